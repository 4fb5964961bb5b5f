//! From which bandwidth between replicas on a method for slow networks pays.
//!
//! A replica of the model is one node or one site. The strategy inside of it stays the same; only what replicas exchange
//! changes; workers of parameter servers are the exception, each of which is one rank. A method pays if it trains as many times more samples per second than gradients in every step as
//! [`Synchronization::required_speedup`] demands.

use trainyard_schedule::ScheduleKind;

use crate::search::{search_local_updates, supports};
use crate::{
    ClusterError, Compression, Degrees, LocalUpdateMethod, LocalUpdates, PipelineLayout,
    PlanRequest, Recompute, Sites, Strategy, Synchronization, peak, time,
};

/// The bandwidths of a table, in Gb/s.
const GBIT_S: [f64; 4] = [1.0, 10.0, 25.0, 100.0];

/// The range of bandwidths, in Gb/s, in which the one is searched from which on a method pays.
const SEARCHED_GBIT_S: (f64, f64) = (1e-3, 1e5);

/// The round trip between two nodes on Ethernet, in milliseconds.
const ETHERNET_ROUND_TRIP_MS: f64 = 0.1;

/// All methods on one kind of network between replicas.
#[derive(Clone, Debug, PartialEq)]
pub struct MethodTable {
    /// What a replica is trained on.
    pub unit: ReplicaUnit,
    /// The number of replicas.
    pub num_replicas: usize,
    /// The round trip between two replicas, in milliseconds.
    pub round_trip_ms: f64,
    /// The bandwidths of the estimates, in Gb/s.
    pub gbit_s: Vec<f64>,
    /// The strategy, with gradients in every step.
    pub strategy: Strategy,
    /// Every method that can be combined with the strategy; gradients in every step are the first.
    pub methods: Vec<MethodRow>,
}

/// What one replica of the model is trained on.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum ReplicaUnit {
    /// A node; nodes are joined by Ethernet.
    Node,
    /// A site.
    Site,
}

impl ReplicaUnit {
    /// The word for several of them.
    pub const fn plural(self) -> &'static str {
        match self {
            ReplicaUnit::Node => "nodes",
            ReplicaUnit::Site => "sites",
        }
    }
}

/// One method.
#[derive(Clone, Debug, PartialEq)]
pub struct MethodRow {
    /// What replicas exchange.
    pub synchronization: Synchronization,
    /// An estimate for every bandwidth.
    pub estimates: Vec<Estimate>,
    /// The bandwidths at which the method pays.
    pub pays: Threshold,
}

/// One method at one bandwidth.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Estimate {
    /// Seconds of a step.
    pub seconds: f64,
    /// How many times as many samples per second it trains as gradients in every step.
    pub speedup: f64,
    /// Whether that is enough.
    pub pays: bool,
}

/// The bandwidths at which a method pays.
#[derive(Copy, Clone, Debug, PartialEq)]
pub enum Threshold {
    /// None.
    Never,
    /// Those below this one, in Gb/s.
    Below(f64),
    /// Those between these two, in Gb/s: a parameter server sends more than an all-reduce, but may hide it.
    Between(f64, f64),
    /// Those above this one, in Gb/s.
    Above(f64),
    /// All, because of the round trip.
    Always,
}

impl Threshold {
    /// Whether the method pays at this bandwidth, in Gb/s.
    pub fn contains(self, gbit_s: f64) -> bool {
        match self {
            Threshold::Never => false,
            Threshold::Below(most) => gbit_s <= most,
            Threshold::Between(least, most) => (least..=most).contains(&gbit_s),
            Threshold::Above(least) => gbit_s >= least,
            Threshold::Always => true,
        }
    }
}

/// The methods between the nodes of a cluster of one site, joined by Ethernet. `None` if there is one node, or if it cannot hold a
/// replica.
pub fn between_nodes(request: &PlanRequest) -> Option<MethodTable> {
    let num_nodes = request.cluster.num_nodes / request.cluster.num_sites();
    let mut one_site = request.clone();
    one_site.cluster.sites = None;
    one_site.cluster.num_nodes = num_nodes;
    one_site.global_batch = request.global_batch / request.cluster.num_sites();
    let unit = ReplicaUnit::Node;
    method_table(&one_site, unit, num_nodes, ETHERNET_ROUND_TRIP_MS).ok()?
}

/// The methods between the sites of a cluster with this round trip in milliseconds; between two clusters like this one, if it
/// is one site. `None` if a site cannot hold a replica.
pub fn between_sites(request: &PlanRequest, round_trip_ms: f64) -> Option<MethodTable> {
    let num_sites = request.cluster.num_sites().max(2);
    let mut several = request.clone();
    if request.cluster.sites.is_none() {
        several.cluster.num_nodes *= num_sites;
        several.global_batch *= num_sites;
    }
    method_table(&several, ReplicaUnit::Site, num_sites, round_trip_ms).ok()?
}

fn method_table(
    request: &PlanRequest,
    unit: ReplicaUnit,
    num_replicas: usize,
    round_trip_ms: f64,
) -> Result<Option<MethodTable>, ClusterError> {
    let request = with_network(request, num_replicas, GBIT_S[1], round_trip_ms)?;
    let Some(best) = search_local_updates(&request) else {
        return Ok(None);
    };
    let strategy = synchronized(&best.strategy, Synchronization::PLAIN);
    let methods = methods().into_iter();
    let methods =
        methods.filter_map(|synchronization| method_row(&request, &strategy, synchronization));
    Ok(Some(MethodTable {
        unit,
        num_replicas,
        round_trip_ms,
        gbit_s: GBIT_S.to_vec(),
        methods: methods.collect(),
        strategy,
    }))
}

fn method_row(
    request: &PlanRequest,
    plain: &Strategy,
    synchronization: Synchronization,
) -> Option<MethodRow> {
    let strategy = combined(request, plain, synchronization)?;
    let estimate = |gbit_s: f64| estimate(request, plain, &strategy, gbit_s);
    Some(MethodRow {
        synchronization,
        estimates: GBIT_S.map(estimate).to_vec(),
        pays: threshold(|gbit_s| estimate(gbit_s).pays),
    })
}

/// A strategy with another synchronization, if the trainer can combine them and a rank has the memory for it. Methods with error
/// feedback need gradients that are not sharded.
fn combined(
    request: &PlanRequest,
    plain: &Strategy,
    synchronization: Synchronization,
) -> Option<Strategy> {
    let mut strategy = synchronized(plain, synchronization);
    match synchronization {
        Synchronization::EveryStep(compression) => {
            if compression.keeps_errors() {
                strategy.zero_stage = 0;
                strategy.precision = request.precision.at(0);
            }
            if compression.encodes_blocks() && strategy.degrees.tp > 1 {
                return None;
            }
        }
        Synchronization::ParameterServer { .. } => {
            return workers(request, plain, synchronization);
        }
        Synchronization::LocalUpdates(_) => {}
    }
    let is_supported = supports(&synchronization, &strategy.degrees, strategy.zero_stage);
    (is_supported && fits(request, &strategy)).then_some(strategy)
}

/// A worker of parameter servers on every rank. It computes whole gradients by itself, and recomputes activations if they do not
/// fit otherwise.
fn workers(
    request: &PlanRequest,
    plain: &Strategy,
    synchronization: Synchronization,
) -> Option<Strategy> {
    let dp_outer = plain.degrees.world_size();
    let alone = Strategy {
        degrees: Degrees {
            dp_outer,
            ..Degrees::ONE
        },
        zero_stage: 0,
        sequence_parallel: false,
        pipeline: PipelineLayout {
            schedule: ScheduleKind::OneForwardOneBackward,
            stages_per_rank: 1,
        },
        micro_batch: 1,
        precision: request.precision.at(0),
        ..synchronized(plain, synchronization)
    };
    if !alone.global_batch.is_multiple_of(dp_outer) {
        return None;
    }
    let recompute = [Recompute::None, Recompute::Full].into_iter();
    let mut strategies = recompute.map(|recompute| Strategy {
        recompute,
        ..alone.clone()
    });
    strategies.find(|strategy| fits(request, strategy))
}

fn fits(request: &PlanRequest, strategy: &Strategy) -> bool {
    let capacity = request.cluster.accelerator.memory.value;
    peak(&request.memories(strategy)).is_some_and(|memory| memory.total() <= capacity)
}

fn synchronized(strategy: &Strategy, synchronization: Synchronization) -> Strategy {
    Strategy {
        synchronization,
        ..strategy.clone()
    }
}

/// A strategy at this bandwidth between replicas, compared with the plain one.
fn estimate(request: &PlanRequest, plain: &Strategy, strategy: &Strategy, gbit_s: f64) -> Estimate {
    let mut cluster = request.cluster.clone();
    if let Some(sites) = &mut cluster.sites {
        sites.set_gbit_s(gbit_s);
    }
    let of = |strategy| time(&request.shape, strategy, &cluster, &request.calibration).likely;
    let (seconds, required) = (of(strategy), strategy.synchronization.required_speedup());
    let speedup = of(plain) / seconds;
    Estimate {
        seconds,
        speedup,
        pays: speedup >= required && strategy.synchronization != Synchronization::PLAIN,
    }
}

/// The bandwidths at which `pays` holds. They are contiguous: a method gains little where the network hardly matters, and a
/// parameter server, which sends more, gains nothing where the network alone matters.
fn threshold(pays: impl Fn(f64) -> bool) -> Threshold {
    let (least, most) = SEARCHED_GBIT_S;
    let num_steps = 10 * (most / least).log10().round() as i32;
    let at = |step: i32| least * 10f64.powf(f64::from(step) / 10.0);
    let paying: Vec<i32> = (0..=num_steps).filter(|step| pays(at(*step))).collect();
    let (Some(&first), Some(&last)) = (paying.first(), paying.last()) else {
        return Threshold::Never;
    };
    let below = |step: i32| boundary(&pays, at(step), at(step + 1));
    match (first == 0, last == num_steps) {
        (true, true) => Threshold::Always,
        (true, false) => Threshold::Below(below(last)),
        (false, true) => Threshold::Above(boundary(&pays, at(first), at(first - 1))),
        (false, false) => {
            Threshold::Between(boundary(&pays, at(first), at(first - 1)), below(last))
        }
    }
}

/// Bisects (on a logarithmic scale) between a bandwidth that pays and one that does not.
fn boundary(pays: impl Fn(f64) -> bool, mut paying: f64, mut other: f64) -> f64 {
    while (paying / other).ln().abs() > 0.01 {
        let between = (paying * other).sqrt();
        if pays(between) {
            paying = between;
        } else {
            other = between;
        }
    }
    paying
}

/// The request with replicas as sites of this network.
fn with_network(
    request: &PlanRequest,
    num_replicas: usize,
    gbit_s: f64,
    round_trip_ms: f64,
) -> Result<PlanRequest, ClusterError> {
    let sites = Sites::new(num_replicas, gbit_s, Some(round_trip_ms))?;
    let cluster = request.cluster.clone().with_sites(sites)?;
    Ok(PlanRequest {
        cluster,
        ..request.clone()
    })
}

/// The methods of a table, with the defaults of their config keys.
fn methods() -> Vec<Synchronization> {
    let diloco = LocalUpdates::plain(LocalUpdateMethod::Diloco);
    let compressed = [
        Compression::None,
        Compression::Bf16,
        Compression::Int8,
        Compression::TopK { share: 0.01 },
        Compression::RandomK { share: 0.01 },
        Compression::PowerSgd { rank: 1 },
    ];
    let local = [
        LocalUpdates::plain(LocalUpdateMethod::LocalSgd),
        diloco,
        LocalUpdates {
            compression: Compression::Int8,
            ..diloco
        },
        LocalUpdates {
            num_fragments: 4,
            fragment_sync_delay: 5,
            ..diloco
        },
        LocalUpdates::plain(LocalUpdateMethod::SparseLoco { share: 0.02 }),
    ];
    let servers = [0, 4].map(|staleness| Synchronization::ParameterServer { staleness });
    let every_step = compressed.map(Synchronization::EveryStep);
    let local = local.map(Synchronization::LocalUpdates);
    every_step.into_iter().chain(local).chain(servers).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thresholds_are_found() {
        assert_eq!(threshold(|_| false), Threshold::Never);
        assert_eq!(threshold(|_| true), Threshold::Always);
        let near = |found: f64, expected: f64| (found / expected - 1.0).abs() < 0.011;
        assert!(matches!(threshold(|x| x < 33.0), Threshold::Below(x) if near(x, 33.0)));
        assert!(matches!(threshold(|x| x > 33.0), Threshold::Above(x) if near(x, 33.0)));
        let found = threshold(|x| x > 4.0 && x < 50.0);
        assert!(
            matches!(found, Threshold::Between(a, b) if near(a, 4.0) && near(b, 50.0)),
            "{found:?}"
        );
    }
}

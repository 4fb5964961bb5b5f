//! The times of a run's collectives, which the network constants are fitted to.
//!
//! A rank that arrives early waits inside the collective for the others, so the shortest time over all ranks
//! counts: that rank arrived last. A collective that starts while another is running shares the network with it, so
//! only the time after the other's end counts.

use std::collections::BTreeMap;
use std::fmt;

use trainyard_mesh::{AxisSet, Mesh};
use trainyard_trace::{Collective, CollectiveKind, Events, Purpose, readable_bytes};

use trainyard_plan::{Cluster, Group, NetworkModel};

/// Collectives of one kind and size along the same axes.
#[derive(Clone, Debug, PartialEq)]
pub struct CollectiveTime {
    /// The mesh axes of the group.
    pub axes: String,
    /// The kind of collective.
    pub kind: CollectiveKind,
    /// The group's placement on nodes.
    pub group: Group,
    /// Bytes that a rank sends.
    pub sent_bytes: u64,
    /// Number of measured collectives.
    pub count: usize,
    /// Median seconds of one.
    pub seconds: f64,
}

impl CollectiveTime {
    /// The predicted seconds of one.
    pub fn predicted(&self, network: &NetworkModel<'_>) -> f64 {
        let size = self.group.size as f64;
        let once = self.sent_bytes as f64 * size / (size - 1.0);
        match self.kind {
            CollectiveKind::AllReduce => network.all_reduce(self.group, once / 2.0),
            CollectiveKind::AllToAll => network.all_to_all(self.group, once),
            _ => network.gather(self.group, once),
        }
    }
}

impl fmt::Display for CollectiveTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = readable_bytes(self.sent_bytes);
        write!(
            f,
            "{} {} of {bytes}, {} calls",
            self.axes, self.kind, self.count
        )
    }
}

/// Whether the duration reflects bytes on the network. Point-to-point transfers are excluded: they end when the
/// receiver asks for the data.
fn is_timed(collective: &Collective) -> bool {
    let kinds = [
        CollectiveKind::AllReduce,
        CollectiveKind::AllGather,
        CollectiveKind::ReduceScatter,
        CollectiveKind::AllToAll,
    ];
    kinds.contains(&collective.kind)
        && collective.purpose != Purpose::Control
        && collective.group_size > 1
        && collective.sent_bytes > 0
}

/// One collective on all ranks of a group: axes, first rank, sequence number.
type Instance<'a> = (&'a str, usize, u64);
/// Axes, kind, ranks per node, bytes sent.
type Class<'a> = (&'a str, CollectiveKind, usize, u64);

/// The times of all collectives by axes, kind and size.
pub(super) fn times(ranks: &[Events], mesh: &Mesh, cluster: &Cluster) -> Vec<CollectiveTime> {
    let mut instances: BTreeMap<Instance<'_>, (Class<'_>, f64)> = BTreeMap::new();
    for events in ranks {
        for (each, seconds) in exclusive_times(&events.collectives) {
            let Some((first, in_node)) = placement(each, events.rank, mesh, cluster) else {
                continue;
            };
            let class = (each.group.as_str(), each.kind, in_node, each.sent_bytes);
            let instance = (each.group.as_str(), first, each.sequence);
            let entry = instances.entry(instance).or_insert((class, f64::INFINITY));
            entry.1 = entry.1.min(seconds);
        }
    }
    let mut classes: BTreeMap<Class<'_>, Vec<f64>> = BTreeMap::new();
    for (class, seconds) in instances
        .into_values()
        .filter(|(_, seconds)| *seconds > 0.0)
    {
        classes.entry(class).or_default().push(seconds);
    }
    let times = classes.into_iter().map(|(class, mut seconds)| {
        let (axes, kind, in_node, sent_bytes) = class;
        seconds.sort_by(f64::total_cmp);
        let size = axes
            .parse()
            .map_or(in_node, |axes: AxisSet| mesh.size_of(axes));
        CollectiveTime {
            axes: axes.to_owned(),
            kind,
            group: Group::of_one_site(size, in_node),
            sent_bytes,
            count: seconds.len(),
            seconds: seconds[seconds.len() / 2],
        }
    });
    times.collect()
}

/// The time of each collective after the end of the ones before it.
fn exclusive_times(collectives: &[Collective]) -> impl Iterator<Item = (&Collective, f64)> {
    let mut ordered: Vec<&Collective> = collectives.iter().filter(|each| is_timed(each)).collect();
    ordered.sort_by_key(|each| each.started_ns);
    let mut free_ns = 0;
    ordered.into_iter().map(move |each| {
        let took = each.ended_ns.saturating_sub(each.started_ns.max(free_ns));
        free_ns = free_ns.max(each.ended_ns);
        (each, took as f64 / 1e9)
    })
}

/// The first rank of the collective's group, and how many of its ranks share a node.
fn placement(
    collective: &Collective,
    rank: usize,
    mesh: &Mesh,
    cluster: &Cluster,
) -> Option<(usize, usize)> {
    let axes: AxisSet = collective.group.parse().ok()?;
    let members = mesh.group(rank, axes).ok()?;
    let node = |rank: usize| rank / cluster.gpus_per_node.max(1);
    let first = *members.first()?;
    let same_node = members
        .iter()
        .filter(|member| node(**member) == node(first));
    Some((first, same_node.count()))
}

//! An exhaustive search over strategies: the fastest that fit in memory, and the nearest that do not.
//!
//! For each strategy the search first computes memory, then a lower bound on step time, and only then the full
//! estimate. Strategies are compared by their effective step time, in which a method that changes convergence counts as
//! slower than it is. It reports the fastest strategy of every mesh, so the runner-up is another mesh and not the same one
//! with a different knob. The Pareto front also contains slower strategies that need less memory or cost less.

use std::cmp::Ordering;
use std::collections::{HashMap, HashSet};
use trainyard_arch::DecoderConfig;

use trainyard_schedule::ScheduleKind;

use crate::flops::matrix_flops;
use crate::stages::blocks_of_stage;
use crate::{
    AttentionKernel, Calibration, Cluster, Compression, Degrees, LocalUpdateMethod, LocalUpdates,
    Memory, Offload, Overheads, PipelineLayout, PrecisionByStage, Recompute, Strategy,
    Synchronization, Time, memory, peak, time, time_simulated,
};

/// What to plan: a model, a cluster, a batch, and how the program runs.
#[derive(Clone, Debug)]
pub struct PlanRequest {
    /// The model's shape.
    pub shape: DecoderConfig,
    /// The nodes and their accelerators.
    pub cluster: Cluster,
    /// How the training program runs, and how far it falls short of data sheets.
    pub calibration: Calibration,
    /// Memory that no tensor accounts for: driver context, workspaces, fragmentation.
    pub overheads: Overheads,
    /// Samples in a step, over all ranks (the global batch size).
    pub global_batch: usize,
    /// Tokens of a sample (the sequence length).
    pub seq_len: usize,
    /// Bytes per element of parameters, gradients and optimizer states, by ZeRO stage.
    pub precision: PrecisionByStage,
    /// Whether the search may use fewer nodes than the cluster has, to reduce cost.
    pub allow_fewer_nodes: bool,
}

/// A strategy with its estimated step time and memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// How the model, the optimizer states and the batch are split over the ranks.
    pub strategy: Strategy,
    /// The estimated step time, term by term.
    pub time: Time,
    /// Memory of the rank that needs the most.
    pub memory: Memory,
}

impl Plan {
    /// GPU-seconds of a step: step time times the number of accelerators.
    pub fn cost(&self) -> f64 {
        self.time.likely * self.strategy.degrees.world_size() as f64
    }

    /// Step time, in seconds, times what the synchronization must be faster by to be worth its effect on convergence.
    pub fn effective_seconds(&self) -> f64 {
        effective_seconds(&self.strategy, self.time.likely)
    }

    fn is_dominated_by(&self, other: &Plan) -> bool {
        let objectives = |plan: &Plan| [plan.effective_seconds(), plan.memory.total(), plan.cost()];
        let (own, theirs) = (objectives(self), objectives(other));
        let never_worse = theirs.iter().zip(&own).all(|(a, b)| a <= b);
        never_worse && theirs.iter().zip(&own).any(|(a, b)| a < b)
    }
}

/// The outcome of a search.
#[derive(Clone, Debug, Default)]
pub struct SearchResult {
    /// The fastest plan of every mesh that fits, fastest first.
    pub plans: Vec<Plan>,
    /// The Pareto front of step time, memory and cost.
    pub pareto_front: Vec<Plan>,
    /// The fastest plan that would fit with up to twice the memory, if it beats every plan that fits.
    pub with_more_memory: Option<Plan>,
    /// If nothing fits, the plan with the smallest peak memory.
    pub nearest_miss: Option<Plan>,
    /// Number of strategies considered.
    pub num_considered: usize,
    /// Number of strategies that do not fit in memory.
    pub num_out_of_memory: usize,
    /// Number of strategies whose step time was estimated in full.
    pub num_estimated: usize,
}

/// Number of finalists whose pipeline schedule is simulated action by action.
const FINALISTS: usize = 8;

/// Searches all strategies for a request. Offloading to host memory is tried only if nothing fits without it.
pub fn search(request: &PlanRequest) -> SearchResult {
    let mut state = SearchState::new(request);
    state.search_all(Offload::None);
    if state.best.is_empty() {
        state.search_all(Offload::Cpu);
    }
    state.finish()
}

/// The fastest strategy of one replica per site, if replicas are joined by DiLoCo and fit. Strategies that can be combined with
/// compression come first.
pub fn search_local_updates(request: &PlanRequest) -> Option<Plan> {
    let num_sites = request.cluster.num_sites();
    let [plain, compressed] = between_sites();
    [compressed, plain].into_iter().find_map(|synchronization| {
        let mut state = SearchState::new(request);
        state.search_replicas(synchronization, num_sites, Offload::None);
        state.finish().plans.into_iter().next()
    })
}

/// The fastest strategy of one mesh; if none fits, the one with the smallest shortfall. Returns `None` if the mesh
/// cannot divide the batch, heads, sequence, layers or experts.
pub fn search_mesh(request: &PlanRequest, degrees: Degrees) -> Option<Plan> {
    let can_shard = degrees.dp_shard * degrees.cp > 1;
    let replicas = degrees.data_parallel();
    let is_even = replicas > 0 && request.global_batch.is_multiple_of(replicas);
    let divides = degrees.pp <= request.shape.num_hidden_layers
        && degrees.tp > 0
        && divides_heads(&request.shape, degrees.tp)
        && request.seq_len.is_multiple_of(degrees.cp)
        && experts_fit(request, &degrees);
    if !is_even || !divides {
        return None;
    }
    for offload in [Offload::None, Offload::Cpu] {
        let mut state = SearchState::new(request);
        let stages = match offload {
            Offload::None if can_shard => 0..=3,
            Offload::None => 0..=0,
            _ => 3..=3,
        };
        for zero_stage in stages {
            state.search_mesh(degrees, zero_stage, offload, Synchronization::PLAIN);
        }
        let found = state.finish();
        let is_last = offload == Offload::Cpu;
        let miss = found.nearest_miss.filter(|_| is_last);
        if let Some(plan) = found.plans.into_iter().next().or(miss) {
            return Some(plan);
        }
    }
    None
}

struct SearchState<'a> {
    request: &'a PlanRequest,
    /// Floating-point operations of a step's matrix products.
    matrix_flops: f64,
    /// The fastest plan that fits, for every mesh, ZeRO stage and recomputation mode: these trade time for memory.
    best: HashMap<(Degrees, usize, Recompute), Plan>,
    /// Effective step time of the fastest plan so far that fits, in seconds.
    fastest: f64,
    with_more_memory: Option<Plan>,
    nearest_miss: Option<Plan>,
    result: SearchResult,
}

impl<'a> SearchState<'a> {
    fn new(request: &'a PlanRequest) -> SearchState<'a> {
        SearchState {
            request,
            matrix_flops: matrix_flops(&request.shape, request.global_batch * request.seq_len),
            best: HashMap::new(),
            fastest: f64::INFINITY,
            with_more_memory: None,
            nearest_miss: None,
            result: SearchResult::default(),
        }
    }

    fn search_all(&mut self, offload: Offload) {
        let num_sites = self.request.cluster.num_sites();
        self.search_replicas(Synchronization::PLAIN, 1, offload);
        if num_sites > 1 && offload == Offload::None {
            for synchronization in between_sites() {
                self.search_replicas(synchronization, num_sites, offload);
            }
        }
    }

    /// Searches the strategies of `dp_outer` replicas.
    fn search_replicas(
        &mut self,
        synchronization: Synchronization,
        dp_outer: usize,
        offload: Offload,
    ) {
        let request = self.request;
        for degrees in meshes(request, dp_outer) {
            for (zero_stage, dp_replicate) in zero_layouts(request, &degrees, offload) {
                let degrees = Degrees {
                    dp_replicate,
                    dp_shard: degrees.dp_shard / dp_replicate,
                    ..degrees
                };
                let is_supported = supports(&synchronization, &degrees, zero_stage);
                if !experts_fit(request, &degrees) || !is_supported {
                    continue;
                }
                self.search_mesh(degrees, zero_stage, offload, synchronization);
            }
        }
    }

    fn search_mesh(
        &mut self,
        degrees: Degrees,
        zero_stage: usize,
        offload: Offload,
        synchronization: Synchronization,
    ) {
        let request = self.request;
        let each = request.global_batch / degrees.data_parallel();
        for micro_batch in powers(each).filter(|size| each.is_multiple_of(*size)) {
            let num_microbatches = each / micro_batch;
            for pipeline in layouts(&request.shape, degrees.pp, num_microbatches) {
                for &recompute in recomputations(request) {
                    self.consider(Strategy {
                        degrees,
                        zero_stage,
                        sequence_parallel: degrees.tp > 1,
                        pipeline,
                        global_batch: request.global_batch,
                        micro_batch,
                        seq_len: request.seq_len,
                        recompute,
                        offload,
                        precision: request.precision.at(zero_stage),
                        synchronization,
                        split_points: Vec::new(),
                    });
                }
            }
        }
    }

    fn consider(&mut self, strategy: Strategy) {
        let PlanRequest {
            shape,
            cluster,
            calibration,
            overheads,
            ..
        } = self.request;
        self.result.num_considered += 1;
        let all = memory(shape, &strategy, &calibration.software, overheads);
        let Some(&memory) = peak(&all) else { return };
        let capacity = cluster.accelerator.memory.value;
        let fits = memory.total() <= capacity;
        if !fits {
            self.result.num_out_of_memory += 1;
            self.record_miss(&strategy, memory);
        }
        let to_beat = self.to_beat(&strategy, fits);
        let bound = lower_bound(self.request, self.matrix_flops, &strategy);
        let bound = effective_seconds(&strategy, bound);
        if memory.total() > 2.0 * capacity || bound >= to_beat {
            return;
        }
        self.result.num_estimated += 1;
        let time = time(shape, &strategy, cluster, calibration);
        if effective_seconds(&strategy, time.likely) < to_beat {
            self.keep(
                Plan {
                    strategy,
                    time,
                    memory,
                },
                fits,
            );
        }
    }

    /// The effective step time, in seconds, that a strategy must beat to be recorded.
    fn to_beat(&self, strategy: &Strategy, fits: bool) -> f64 {
        let seconds = |plan: Option<&Plan>| plan.map_or(f64::INFINITY, Plan::effective_seconds);
        if fits {
            seconds(self.best.get(&key(strategy)))
        } else {
            seconds(self.with_more_memory.as_ref()).min(self.fastest)
        }
    }

    fn keep(&mut self, plan: Plan, fits: bool) {
        if fits {
            self.fastest = self.fastest.min(plan.effective_seconds());
            self.best.insert(key(&plan.strategy), plan);
        } else {
            self.with_more_memory = Some(plan);
        }
    }

    fn record_miss(&mut self, strategy: &Strategy, peak: Memory) {
        let known = self.nearest_miss.as_ref();
        if known.is_some_and(|plan| plan.memory.total() <= peak.total()) {
            return;
        }
        self.nearest_miss = Some(Plan {
            strategy: strategy.clone(),
            time: Time::default(),
            memory: peak,
        });
    }

    fn finish(mut self) -> SearchResult {
        let request = self.request;
        let mut all: Vec<Plan> = self.best.into_values().collect();
        all.sort_by(by_time);
        let mut front = pareto_front(&all);
        let mut seen = HashSet::new();
        all.retain(|plan| seen.insert(plan.strategy.degrees));
        for plan in all.iter_mut().take(FINALISTS) {
            plan.time = simulated(request, plan);
        }
        all.sort_by(by_time);
        for plan in &mut front {
            plan.time = simulated(request, plan);
        }
        // The simulated times may dominate plans that the closed form kept.
        front.extend(all.iter().take(FINALISTS).cloned());
        front.sort_by(by_time);
        front.dedup_by(|a, b| a.strategy == b.strategy);
        self.result.pareto_front = pareto_front(&front);
        let fastest = all.first().map_or(f64::INFINITY, Plan::effective_seconds);
        let more = self.with_more_memory;
        self.result.with_more_memory = more.filter(|plan| plan.effective_seconds() < fastest);
        let miss = self.nearest_miss.filter(|_| all.is_empty());
        self.result.nearest_miss = miss.map(|plan| Plan {
            time: simulated(request, &plan),
            ..plan
        });
        self.result.plans = all;
        self.result
    }
}

const fn key(strategy: &Strategy) -> (Degrees, usize, Recompute) {
    (strategy.degrees, strategy.zero_stage, strategy.recompute)
}

/// A step time with the margin for the effect of the strategy's synchronization on convergence.
fn effective_seconds(strategy: &Strategy, seconds: f64) -> f64 {
    seconds * strategy.synchronization.required_speedup()
}

/// Sorts by effective step time, then by memory and mesh, so the order is deterministic.
fn by_time(a: &Plan, b: &Plan) -> Ordering {
    let seconds = a.effective_seconds().total_cmp(&b.effective_seconds());
    let bytes = a.memory.total().total_cmp(&b.memory.total());
    let degrees = a.strategy.degrees.cmp(&b.strategy.degrees);
    seconds.then(bytes).then(degrees)
}

/// The plan's step time with its schedule simulated; the closed form if the schedule cannot be built.
pub(crate) fn simulated(request: &PlanRequest, plan: &Plan) -> Time {
    let PlanRequest {
        shape,
        cluster,
        calibration,
        ..
    } = request;
    time_simulated(shape, &plan.strategy, cluster, calibration)
        .unwrap_or_else(|_| time(shape, &plan.strategy, cluster, calibration))
}

/// The plans that no other plan dominates, fastest first.
fn pareto_front(plans: &[Plan]) -> Vec<Plan> {
    let front = |plan: &&Plan| !plans.iter().any(|other| plan.is_dominated_by(other));
    plans.iter().filter(front).cloned().collect()
}

/// What is tried between sites beside gradients in every step: DiLoCo, and the same with fewer bytes.
fn between_sites() -> [Synchronization; 2] {
    let plain = LocalUpdates::plain(LocalUpdateMethod::Diloco);
    let compressed = LocalUpdates {
        compression: Compression::Int8,
        ..plain
    };
    [plain, compressed].map(Synchronization::LocalUpdates)
}

/// Whether the trainer can combine a synchronization with a mesh and a ZeRO stage.
pub(crate) fn supports(
    synchronization: &Synchronization,
    degrees: &Degrees,
    zero_stage: usize,
) -> bool {
    let local = match synchronization {
        Synchronization::EveryStep(_) => return true,
        Synchronization::ParameterServer { .. } => return degrees.replica_size() == 1,
        Synchronization::LocalUpdates(local) => local,
    };
    if local.num_fragments > 1 && degrees.pp > 1 {
        return false;
    }
    let is_split = degrees.tp > 1 || degrees.pp > 1;
    let is_sharded = degrees.dp_shard > 1;
    let shards_states_only = is_sharded && [1, 2].contains(&zero_stage);
    // Stage 3 over context-parallel ranks alone does not exist.
    let is_stage_without_shards = !is_sharded && zero_stage > 0;
    !(shards_states_only || is_stage_without_shards || local.encodes_blocks() && is_split)
}

/// All meshes of `dp_outer` replicas, with every data-parallel rank of a replica in `dp_shard`. Tensor parallelism stays
/// within a node.
fn meshes(request: &PlanRequest, dp_outer: usize) -> Vec<Degrees> {
    let (shape, cluster) = (&request.shape, &request.cluster);
    let mut found = Vec::new();
    if request.seq_len == 0 {
        return found;
    }
    let mut worlds = vec![cluster.world_size() / dp_outer];
    if request.allow_fewer_nodes && dp_outer == 1 {
        let node_counts = powers(cluster.num_nodes / 2);
        worlds.extend(node_counts.map(|count| count * cluster.gpus_per_node));
    }
    for world in worlds {
        for tp in divisors(cluster.gpus_per_node.min(world)) {
            if !divides_heads(shape, tp) || !world.is_multiple_of(tp) {
                continue;
            }
            // Fewer than 2,048 positions per rank leave too little work to hide communication.
            let most = (request.seq_len / 2048).max(1);
            for cp in powers(most).filter(|cp| (world / tp).is_multiple_of(*cp)) {
                let left = world / tp / cp;
                let depths = 1..=left.min(shape.num_hidden_layers);
                for pp in depths.filter(|pp| left.is_multiple_of(*pp)) {
                    let dp_shard = left / pp;
                    if !request.global_batch.is_multiple_of(dp_outer * dp_shard) {
                        continue;
                    }
                    let degrees = Degrees {
                        dp_outer,
                        pp,
                        dp_replicate: 1,
                        dp_shard,
                        cp,
                        tp,
                        ep: 1,
                    };
                    let experts = expert_degrees(shape, &degrees);
                    found.extend(experts.into_iter().map(|ep| Degrees { ep, ..degrees }));
                }
            }
        }
    }
    found
}

/// Whether every tensor-parallel rank gets whole attention heads. Latent attention replicates the key/value
/// latents, so only query heads must divide.
fn divides_heads(shape: &DecoderConfig, tp: usize) -> bool {
    let divides_kv = shape.latent.is_some() || shape.num_key_value_heads.is_multiple_of(tp);
    shape.num_attention_heads.is_multiple_of(tp) && divides_kv
}

fn expert_degrees(shape: &DecoderConfig, degrees: &Degrees) -> Vec<usize> {
    let Some(experts) = &shape.moe else {
        return vec![1];
    };
    let over = degrees.dp_shard * degrees.cp * degrees.tp;
    let all = divisors(experts.num_experts).into_iter();
    all.filter(|ep| over.is_multiple_of(*ep)).collect()
}

fn experts_fit(request: &PlanRequest, degrees: &Degrees) -> bool {
    let over = degrees.dp_shard * degrees.cp * degrees.tp;
    request.shape.moe.is_none() || over.is_multiple_of(degrees.ep)
}

/// ZeRO stages, each with the number of data-parallel replicas: one, one per node, or one per site (HSDP).
fn zero_layouts(request: &PlanRequest, degrees: &Degrees, offload: Offload) -> Vec<(usize, usize)> {
    let ranks = degrees.dp_shard;
    if ranks == 1 && degrees.cp == 1 {
        let stage = if offload == Offload::None { 0 } else { 3 };
        return vec![(stage, 1)];
    }
    let stages: &[usize] = match offload {
        Offload::None => &[0, 1, 2, 3],
        _ => &[3],
    };
    let mut found: Vec<(usize, usize)> = stages.iter().map(|stage| (*stage, 1)).collect();
    let cluster = &request.cluster;
    let mut sizes = vec![cluster.gpus_per_node];
    if cluster.num_sites() > 1 {
        sizes.push(cluster.gpus_per_site());
    }
    for size in sizes {
        let inside = (size / (degrees.tp * degrees.cp)).max(1);
        if inside > 1 && ranks > inside && ranks.is_multiple_of(inside) {
            let sharded = stages.iter().filter(|stage| **stage > 0);
            found.extend(sharded.map(|stage| (*stage, ranks / inside)));
        }
    }
    found
}

/// Pipeline schedules that suit the numbers of blocks and micro-batches.
fn layouts(shape: &DecoderConfig, pp: usize, num_microbatches: usize) -> Vec<PipelineLayout> {
    let layout = |schedule, stages_per_rank| PipelineLayout {
        schedule,
        stages_per_rank,
    };
    if pp == 1 {
        return vec![layout(ScheduleKind::OneForwardOneBackward, 1)];
    }
    let num_blocks = shape.num_hidden_layers;
    let most = num_blocks.div_ceil(pp);
    let mut found = vec![
        layout(ScheduleKind::OneForwardOneBackward, 1),
        layout(ScheduleKind::ZeroBubbleH1, 1),
    ];
    if num_microbatches.is_multiple_of(pp) {
        let even = |chunks: &usize| {
            let num_stages = pp * chunks;
            // Stages are equal, except that the first and the last may have one block fewer.
            let largest = (0..2.min(num_stages))
                .map(|stage| blocks_of_stage(num_blocks, num_stages, stage))
                .max();
            largest.is_some_and(|largest| largest * num_stages <= num_blocks + 2)
        };
        let chunks = (2..=most).filter(even);
        found.extend(chunks.map(|chunks| layout(ScheduleKind::Interleaved, chunks)));
    }
    if most >= 2 && num_microbatches >= 2 * pp {
        found.push(layout(ScheduleKind::ZeroBubbleV, 2));
    }
    found
}

/// Recomputation modes to try. Flash attention stores no scores, so selective recomputation gains nothing there.
fn recomputations(request: &PlanRequest) -> &'static [Recompute] {
    match request.calibration.software.attention {
        AttentionKernel::Flash => &[Recompute::None, Recompute::Full],
        AttentionKernel::Materialized => &[Recompute::None, Recompute::Selective, Recompute::Full],
    }
}

/// A lower bound on the step time: the matrix products at the rate of very large ones, spread evenly over all
/// ranks, plus the pipeline bubble.
fn lower_bound(request: &PlanRequest, matrix_flops: f64, strategy: &Strategy) -> f64 {
    let accelerator = &request.cluster.accelerator;
    let rate = accelerator.peak.value * request.calibration.constants.matmul;
    let Strategy {
        degrees, pipeline, ..
    } = strategy;
    let bubble = match pipeline.schedule {
        ScheduleKind::OneForwardOneBackward | ScheduleKind::Interleaved => {
            let slots = (strategy.num_microbatches() * pipeline.stages_per_rank) as f64;
            (degrees.pp - 1) as f64 / slots
        }
        _ => 0.0,
    };
    matrix_flops / (degrees.world_size() as f64 * rate) * (1.0 + bubble)
}

/// The powers of two up to `most`.
fn powers(most: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(1usize), |power| power.checked_mul(2))
        .take_while(move |power| *power <= most)
}

fn divisors(number: usize) -> Vec<usize> {
    (1..=number).filter(|d| number.is_multiple_of(*d)).collect()
}

#[cfg(test)]
mod tests {
    use trainyard_arch::Flavor;

    use super::*;
    use crate::Software;

    #[test]
    fn no_plan_beats_its_lower_bound() {
        let cluster: Cluster = "64xH100".parse().unwrap();
        let request = PlanRequest {
            shape: DecoderConfig::from(Flavor::Llama3_8b),
            calibration: Calibration::of(&cluster.accelerator, Software::MODERN),
            cluster,
            overheads: Overheads::default(),
            global_batch: 256,
            seq_len: 8192,
            precision: PrecisionByStage::same(crate::Precision::BF16),
            allow_fewer_nodes: true,
        };
        let found = search(&request);
        assert!(found.plans.len() > 20 && !found.pareto_front.is_empty());
        let flops = matrix_flops(&request.shape, 256 * 8192);
        for plan in &found.plans {
            let bound = lower_bound(&request, flops, &plan.strategy);
            assert!(bound > 0.0 && bound <= plan.time.likely);
        }
        let first = &found.pareto_front[0];
        let mut rest = found.pareto_front.iter();
        assert!(rest.all(|plan| plan.time.likely >= first.time.likely));
        assert!(
            found
                .pareto_front
                .iter()
                .any(|plan| plan.cost() < first.cost())
        );
    }
}

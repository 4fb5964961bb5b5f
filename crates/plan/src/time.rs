//! The step time, term by term.
//!
//! Operators give the time of a block, a closed form gives the pipeline, and data-parallel communication is
//! overlapped with the backward pass as far as it fits. Reports show the same terms in the same order, and the
//! terms sum to the step.

use trainyard_arch::DecoderConfig;
use trainyard_schedule::{
    Costs, ScheduleError, ScheduleKind, StageTime, Timeline, bubble, simulate, zero_bubble_h1,
};

use crate::activations::tokens;
use crate::block::BlockTime;
use crate::compression::Wire;
use crate::network_model::{Group, NetworkModel};
use crate::operator::ComputeModel;
use crate::{
    Calibration, Cluster, Compression, LocalParameters, Offload, RankLayers, Strategy,
    Synchronization,
};

/// The seconds of a step by what they are spent on. The terms sum to `likely`.
#[derive(Copy, Clone, Debug, Default, PartialEq)]
pub struct Time {
    /// Forward and backward compute of the slowest rank.
    pub compute: f64,
    /// Activation recomputation.
    pub recomputation: f64,
    /// Kernel launch overhead: the device waits for the host.
    pub launch: f64,
    /// Exposed tensor-parallel communication.
    pub tensor: f64,
    /// Exposed context-parallel communication (keys and values).
    pub context: f64,
    /// Exposed expert-parallel communication (token dispatch and combine).
    pub expert: f64,
    /// Exposed pipeline-parallel communication (sends between stages).
    pub pipeline: f64,
    /// Exposed data-parallel communication (gradients and sharded parameters).
    pub data: f64,
    /// The pipeline bubble.
    pub bubble: f64,
    /// The optimizer step.
    pub optimizer: f64,
    /// Transfers of offloaded states to and from host memory or disk.
    pub offload: f64,
    /// The share of a step in the outer steps of local updates, or the exchange with parameter servers.
    pub outer: f64,
    /// The step time if all communication that can overlap with compute does.
    pub low: f64,
    /// The expected step time: the sum of the terms.
    pub likely: f64,
    /// The step time if no communication overlaps with compute.
    pub high: f64,
}

impl Time {
    /// The terms with their names, in the order reports show them.
    pub const fn terms(&self) -> [(&'static str, f64); 12] {
        [
            ("compute", self.compute),
            ("recomputation", self.recomputation),
            ("launch", self.launch),
            ("tensor", self.tensor),
            ("context", self.context),
            ("expert", self.expert),
            ("pipeline", self.pipeline),
            ("data", self.data),
            ("bubble", self.bubble),
            ("optimizer", self.optimizer),
            ("offload", self.offload),
            ("outer", self.outer),
        ]
    }

    fn sum(&self) -> f64 {
        self.terms().iter().map(|(_, seconds)| seconds).sum()
    }

    pub(crate) fn with_range(mut self, overlapped: f64, spread: f64) -> Time {
        self.likely = self.sum();
        self.low = (self.likely - self.data - self.pipeline) / (1.0 + spread);
        self.high = (self.likely + overlapped) * (1.0 + spread);
        self
    }
}

/// The time of one micro-batch on the ranks of one class.
#[derive(Copy, Clone, Debug, Default)]
struct RankTime {
    wall: StageTime,
    terms: BlockTime,
}

impl RankTime {
    fn add(&mut self, block: &BlockTime, count: f64) {
        self.wall.forward += count * block.wall.forward;
        self.wall.backward_input += count * block.wall.backward_input;
        self.wall.backward_weight += count * block.wall.backward_weight;
        let terms = &mut self.terms;
        terms.compute += count * block.compute;
        terms.recomputation += count * block.recomputation;
        terms.launch += count * block.launch;
        terms.tensor += count * block.tensor;
        terms.context += count * block.context;
        terms.expert += count * block.expert;
        terms.overlapped += count * block.overlapped;
    }
}

/// The inputs of the estimate of one strategy.
pub(crate) struct StepModel<'a> {
    pub(crate) shape: &'a DecoderConfig,
    pub(crate) strategy: &'a Strategy,
    cluster: &'a Cluster,
    pub(crate) calibration: &'a Calibration,
    pub(crate) compute_model: ComputeModel<'a>,
    pub(crate) network: NetworkModel<'a>,
    /// Every class of ranks and its time per micro-batch.
    ranks: Vec<(RankLayers, RankTime)>,
}

/// The step time in closed form. It takes microseconds to evaluate.
pub fn time(
    shape: &DecoderConfig,
    strategy: &Strategy,
    cluster: &Cluster,
    calibration: &Calibration,
) -> Time {
    let model = StepModel::new(shape, strategy, cluster, calibration);
    let slowest = model.slowest();
    let m = strategy.num_microbatches() as f64;
    let bubble = model.bubble(&slowest);
    let (data, overlapped_data) = model.data(&slowest);
    let (pipeline, overlapped_pipeline) = model.between_stages(&slowest);
    let terms = &slowest.terms;
    let overlapped = m * terms.overlapped + overlapped_data + overlapped_pipeline;
    let inner = Time {
        compute: m * terms.compute,
        recomputation: m * terms.recomputation,
        launch: m * terms.launch,
        tensor: m * terms.tensor,
        context: m * terms.context,
        expert: m * terms.expert,
        pipeline,
        data,
        bubble,
        optimizer: model.optimizer(),
        offload: model.offload(),
        ..Time::default()
    };
    let (outer, overlapped_outer) = model.outer(inner.sum());
    Time { outer, ..inner }.with_range(overlapped + overlapped_outer, calibration.spread)
}

/// The step time with the pipeline schedule simulated action by action, for the few strategies that are shown.
pub fn time_simulated(
    shape: &DecoderConfig,
    strategy: &Strategy,
    cluster: &Cluster,
    calibration: &Calibration,
) -> Result<Time, ScheduleError> {
    let closed = time(shape, strategy, cluster, calibration);
    if strategy.degrees.pp == 1 {
        return Ok(closed);
    }
    let timeline = timeline(shape, strategy, cluster, calibration)?;
    let model = StepModel::new(shape, strategy, cluster, calibration);
    let m = strategy.num_microbatches();
    let busiest = m as f64 * model.slowest().wall.total();
    let bubble = (timeline.end() - busiest).max(0.0);
    let change = bubble - closed.bubble;
    Ok(Time {
        bubble,
        likely: closed.likely + change,
        low: closed.low + change / (1.0 + calibration.spread),
        high: closed.high + change * (1.0 + calibration.spread),
        ..closed
    })
}

/// The simulated timeline of every rank of the pipeline, in seconds.
pub fn timeline(
    shape: &DecoderConfig,
    strategy: &Strategy,
    cluster: &Cluster,
    calibration: &Calibration,
) -> Result<Timeline, ScheduleError> {
    let model = StepModel::new(shape, strategy, cluster, calibration);
    let (pipeline, m) = (&strategy.pipeline, strategy.num_microbatches());
    let schedule = pipeline
        .schedule
        .build(strategy.degrees.pp, m, pipeline.stages_per_rank)?;
    let each = (0..schedule.num_stages()).map(|stage| model.stage(stage));
    simulate(&schedule, &Costs::per_stage(&each.collect::<Vec<_>>()))
}

impl<'a> StepModel<'a> {
    fn new(
        shape: &'a DecoderConfig,
        strategy: &'a Strategy,
        cluster: &'a Cluster,
        calibration: &'a Calibration,
    ) -> StepModel<'a> {
        let constants = &calibration.constants;
        let mut model = StepModel {
            shape,
            strategy,
            cluster,
            calibration,
            compute_model: ComputeModel {
                accelerator: &cluster.accelerator,
                constants,
            },
            network: NetworkModel { cluster, constants },
            ranks: Vec::new(),
        };
        let dense = model.block(false);
        let sparse = if shape.moe.is_some() {
            model.block(true)
        } else {
            dense
        };
        let layers_by_class = strategy.layers_by_class(shape).into_iter();
        model.ranks = layers_by_class
            .map(|rank_layers| (rank_layers, model.rank(&rank_layers, &dense, &sparse)))
            .collect();
        model
    }

    fn block(&self, sparse: bool) -> BlockTime {
        BlockTime::of(
            self.shape,
            self.strategy,
            self.cluster,
            self.calibration,
            sparse,
        )
    }

    fn rank(&self, rank_layers: &RankLayers, dense: &BlockTime, sparse: &BlockTime) -> RankTime {
        let mut rank = RankTime::default();
        rank.add(dense, rank_layers.num_dense as f64);
        rank.add(sparse, rank_layers.num_sparse as f64);
        let chunks = self.strategy.pipeline.stages_per_rank as f64;
        rank.add(&self.host(chunks), 1.0);
        if rank_layers.has_embedding {
            rank.add(&self.embedding(), 1.0);
        }
        if rank_layers.has_head {
            rank.add(&self.head(), 1.0);
        }
        rank
    }

    /// Host time around each stage.
    fn host(&self, chunks: f64) -> BlockTime {
        let seconds = self.calibration.constants.host_microbatch * chunks;
        BlockTime {
            wall: StageTime {
                forward: seconds / 3.0,
                backward_input: seconds * 2.0 / 3.0,
                backward_weight: 0.0,
            },
            launch: seconds,
            ..BlockTime::default()
        }
    }

    fn embedding(&self) -> BlockTime {
        let bytes = tokens(self.strategy) * self.shape.hidden_size as f64;
        compute_only(
            self.compute_model.stream(10.0 * bytes),
            self.compute_model.stream(20.0 * bytes),
            0.0,
        )
    }

    fn head(&self) -> BlockTime {
        let tokens = tokens(self.strategy);
        let tp = self.strategy.degrees.tp;
        let hidden = self.shape.hidden_size as f64;
        let vocab = self.shape.vocab_size as f64 / tp as f64;
        let constants = &self.calibration.constants;
        let per_logit = if tp == 1 {
            constants.loss_alone
        } else {
            constants.loss
        };
        let loss = self.compute_model.stream(tokens * vocab * per_logit);
        compute_only(
            self.compute_model.matmul(1.0, tokens, vocab, hidden) + loss / 2.0,
            self.compute_model.matmul(1.0, tokens, hidden, vocab) + loss / 2.0,
            self.compute_model.matmul(1.0, hidden, vocab, tokens),
        )
    }

    fn slowest(&self) -> RankTime {
        let by_wall = |a: &&(RankLayers, RankTime), b: &&(RankLayers, RankTime)| {
            a.1.wall.total().total_cmp(&b.1.wall.total())
        };
        let slowest = self.ranks.iter().max_by(by_wall);
        slowest.map_or_else(RankTime::default, |(_, rank)| *rank)
    }

    /// The pipeline bubble: idle time of the slowest rank.
    fn bubble(&self, slowest: &RankTime) -> f64 {
        let pp = self.strategy.degrees.pp;
        if pp == 1 {
            return 0.0;
        }
        let m = self.strategy.num_microbatches();
        if self.strategy.pipeline.schedule == ScheduleKind::ZeroBubbleH1 && m >= 2 * pp {
            // How many weight gradients a rank defers, and so which gaps they fill, depends on its position.
            let wall = |position: usize| self.ranks[position.min(self.ranks.len() - 1)].1.wall;
            let ends = [wall(0), wall(1), wall(self.ranks.len() - 1)];
            let step = zero_bubble_h1(ends, pp, m);
            return (step - m as f64 * slowest.wall.total()).max(0.0);
        }
        let mut sum = StageTime::default();
        let mut add = |wall: &StageTime, count: f64| {
            sum.forward += count * wall.forward;
            sum.backward_input += count * wall.backward_input;
            sum.backward_weight += count * wall.backward_weight;
        };
        for (position, (_, rank)) in self.ranks.iter().enumerate() {
            let count = if position == 1 && pp > 2 { pp - 2 } else { 1 };
            add(&rank.wall, count as f64);
        }
        add(&slowest.wall, -1.0);
        let others = (pp - 1) as f64;
        let other = StageTime {
            forward: sum.forward / others,
            backward_input: sum.backward_input / others,
            backward_weight: sum.backward_weight / others,
        };
        let pipeline = &self.strategy.pipeline;
        bubble(pipeline.schedule, pp, m, pipeline.stages_per_rank, other)
    }

    /// One stage's costs, as the simulation takes them.
    fn stage(&self, stage: usize) -> (f64, f64, f64) {
        let num_stages = self.strategy.num_stages();
        let num_blocks = self.shape.num_hidden_layers;
        let count = self.strategy.blocks_of(num_blocks, stage).len() as f64;
        // Dense and expert blocks in the model's proportion.
        let sparse_share = self.shape.num_expert_layers() as f64 / num_blocks as f64;
        let mut rank = RankTime::default();
        rank.add(&self.block(false), count * (1.0 - sparse_share));
        rank.add(&self.block(true), count * sparse_share);
        rank.add(&self.host(1.0), 1.0);
        if stage == 0 {
            rank.add(&self.embedding(), 1.0);
        }
        if stage + 1 == num_stages {
            rank.add(&self.head(), 1.0);
        }
        let wall = rank.wall;
        (wall.forward, wall.backward_input, wall.backward_weight)
    }

    /// The ranks that hold the stages of one pipeline.
    fn stages(&self) -> Group {
        let degrees = &self.strategy.degrees;
        Group::new(self.cluster, degrees.pp, degrees.stage_size())
    }

    /// Sends between stages: exposed and overlapped seconds.
    fn between_stages(&self, slowest: &RankTime) -> (f64, f64) {
        let degrees = &self.strategy.degrees;
        if degrees.pp == 1 {
            return (0.0, 0.0);
        }
        let bytes = tokens(self.strategy)
            * self.shape.hidden_size as f64
            * self.strategy.precision.compute as f64;
        let crosses = degrees.world_size() > self.cluster.gpus_per_node;
        let (bytes, tp) = if self.strategy.sequence_parallel {
            (bytes / degrees.tp as f64, 1)
        } else {
            (bytes, degrees.tp)
        };
        let message = 2.0 * self.network.send(crosses, bytes, tp);
        let fill = (degrees.pp - 1) as f64 * message;
        let chunks = self.strategy.pipeline.stages_per_rank as f64;
        let num_messages = (self.strategy.num_microbatches() as f64 - 1.0) * chunks;
        if self.stages().crosses_sites() {
            return self.between_sites(bytes / tp as f64, fill, num_messages, slowest);
        }
        let steady = num_messages * message;
        if self.calibration.software.overlaps_data {
            (fill, steady)
        } else {
            (fill + steady, 0.0)
        }
    }

    /// Sends between stages in different sites, of `bytes` by every rank: exposed and overlapped seconds. Forward and backward
    /// passes send in opposite directions, so both proceed at the same time.
    fn between_sites(
        &self,
        bytes: f64,
        fill_in_sites: f64,
        num_messages: f64,
        slowest: &RankTime,
    ) -> (f64, f64) {
        let stages = self.stages();
        let message = self.network.send_to_site(bytes, stages.num_sharing);
        let num_boundaries = (stages.num_sites() - 1) as f64;
        let fill = fill_in_sites + 2.0 * num_boundaries * message;
        let steady = num_messages * message;
        let m = self.strategy.num_microbatches() as f64;
        let exposed = if self.calibration.software.overlaps_data {
            exposed(steady, m * slowest.wall.total())
        } else {
            steady
        };
        (fill + exposed, steady - exposed)
    }

    /// The parameters of the rank that has the most.
    pub(crate) fn local(&self) -> LocalParameters {
        let each = self.ranks.iter();
        let each = each
            .map(|(rank_layers, _)| LocalParameters::of(self.shape, self.strategy, rank_layers));
        each.fold(LocalParameters::default(), |most, one| {
            if one.dense + one.experts > most.dense + most.experts {
                one
            } else {
                most
            }
        })
    }

    /// Gradient reduction and parameter gathering: exposed and overlapped seconds.
    fn data(&self, slowest: &RankTime) -> (f64, f64) {
        let degrees = &self.strategy.degrees;
        let local = self.local();
        let shard = Group::new(self.cluster, degrees.dp_shard * degrees.cp, degrees.tp);
        let expert_shard = Group::new(self.cluster, degrees.expert_shard(), degrees.ep);
        let (once, steady) = self.traffic(local.dense, shard, degrees.dp_shard * degrees.cp);
        let (once_e, steady_e) = self.traffic(local.experts, expert_shard, degrees.expert_shard());
        let (once, steady) = (once + once_e, steady + steady_e);
        let tied = self.tied();
        if once + steady == 0.0 {
            return (tied, 0.0);
        }
        let latency = self.calibration.constants.data_latency + tied;
        if !self.calibration.software.overlaps_data {
            return (once + steady + latency, 0.0);
        }
        // Once-per-step communication overlaps only with the last micro-batch's backward; the rest overlaps with
        // all compute.
        let wall = &slowest.wall;
        let m = self.strategy.num_microbatches() as f64;
        let last = wall.backward_input + wall.backward_weight;
        let exposed = exposed(once, last) + exposed(steady, m * wall.total());
        (exposed + latency, once + steady - exposed)
    }

    /// Seconds of communication once per step, and summed over all micro-batches.
    fn traffic(&self, parameters: f64, shard: Group, ranks: usize) -> (f64, f64) {
        let degrees = &self.strategy.degrees;
        let wire = self.gradient_wire();
        let replicas = Group::new(
            self.cluster,
            degrees.dp_replicate,
            degrees.dp_shard * degrees.cp * degrees.tp,
        );
        let values = parameters * self.strategy.precision.compute as f64;
        let network = &self.network;
        let shard_size = parameters / ranks.max(1) as f64;
        let across_replicas = network.reduce(replicas, shard_size, wire)
            + match self.strategy.synchronization {
                Synchronization::EveryStep(_) => {
                    network.reduce(self.outer_group(), shard_size, wire)
                }
                _ => 0.0,
            };
        let m = self.strategy.num_microbatches() as f64;
        match self.strategy.zero_stage {
            0 => (
                network.reduce(self.unsharded(shard), parameters, wire)
                    + network.reduce(replicas, parameters, wire),
                0.0,
            ),
            1 => {
                let scatter_and_gather =
                    network.reduce_scatter(shard, parameters, wire) + network.gather(shard, values);
                (scatter_and_gather + across_replicas, 0.0)
            }
            2 => (
                network.gather(shard, values) + across_replicas,
                m * network.reduce_scatter(shard, parameters, wire),
            ),
            _ => {
                let each = 2.0 * network.gather(shard, values)
                    + network.reduce_scatter(shard, parameters, wire);
                (across_replicas, m * each)
            }
        }
    }

    /// How the gradients of a step travel.
    fn gradient_wire(&self) -> Wire {
        let width = self.calibration.software.gradient_on_wire;
        match self.strategy.synchronization {
            Synchronization::EveryStep(compression) => compression.wire(self.shape, width),
            _ => Compression::None.wire(self.shape, width),
        }
    }

    /// The ranks that average the gradients of a step if nothing is sharded: those of all replicas that are joined in every step.
    fn unsharded(&self, in_replica: Group) -> Group {
        let (outer, joined) = (self.outer_group(), self.strategy.synchronization);
        match joined {
            Synchronization::EveryStep(_) if outer.size > 1 => Group {
                size: in_replica.size * outer.size,
                in_site: in_replica.size * outer.in_site,
                num_sharing: (outer.num_sharing / in_replica.size).max(1),
                ..in_replica
            },
            _ => in_replica,
        }
    }

    /// The ranks that hold the same parameters in all replicas.
    pub(crate) fn outer_group(&self) -> Group {
        let degrees = &self.strategy.degrees;
        Group::new(self.cluster, degrees.dp_outer, degrees.replica_size())
    }

    /// A tied embedding lives on the first and the last stage, which all-reduce its gradient.
    fn tied(&self) -> f64 {
        if self.strategy.degrees.pp == 1 || !self.shape.tie_word_embeddings {
            return 0.0;
        }
        let crosses = self.strategy.degrees.world_size() > self.cluster.gpus_per_node;
        let stages = self.stages();
        let group = Group {
            size: 2,
            in_node: if crosses { 1 } else { 2 },
            in_site: if stages.crosses_sites() { 1 } else { 2 },
            ..stages
        };
        let table = self.shape.embedding() as f64 / self.strategy.degrees.tp as f64;
        let wire = self.calibration.software.gradient_on_wire as f64;
        self.network.all_reduce(group, table * wire)
    }

    fn optimizer(&self) -> f64 {
        let (precision, degrees) = (&self.strategy.precision, &self.strategy.degrees);
        let local = self.local();
        let is_sharded = self.strategy.zero_stage >= 1;
        let share = |ranks: usize| {
            if is_sharded {
                1.0 / ranks.max(1) as f64
            } else {
                1.0
            }
        };
        let parameters = local.dense * share(degrees.dp_shard * degrees.cp)
            + local.experts * share(degrees.expert_shard());
        let each = (precision.parameter + precision.gradient + precision.optimizer) as f64;
        let constants = &self.calibration.constants;
        let passes = self
            .compute_model
            .stream(parameters * each * constants.optimizer);
        passes + constants.optimizer_host
    }

    /// Offloaded states cross the host link, or move at the disk's bandwidth.
    fn offload(&self) -> f64 {
        let bandwidth = match self.strategy.offload {
            Offload::None => return 0.0,
            Offload::Cpu => self.cluster.accelerator.host.value,
            Offload::Nvme => DISK_BANDWIDTH.min(self.cluster.accelerator.host.value),
        };
        let (precision, degrees) = (&self.strategy.precision, &self.strategy.degrees);
        let local = self.local();
        let parameters = local.dense / (degrees.dp_shard * degrees.cp) as f64
            + local.experts / degrees.expert_shard().max(1) as f64;
        let states = 2.0 * parameters * precision.optimizer as f64;
        let m = self.strategy.num_microbatches() as f64;
        let values = 2.0 * m * parameters * precision.compute as f64;
        (states + values) / bandwidth
    }
}

/// Disk bandwidth per rank in bytes per second. An assumption: a quarter of one fast disk.
const DISK_BANDWIDTH: f64 = 1.5e9;

/// The exposed part of communication that overlaps with compute: what exceeds the compute time, plus a tenth of the
/// overlapped part, because both compete for memory bandwidth and compute units.
pub(crate) fn exposed(communication: f64, compute: f64) -> f64 {
    let overlapped = communication.min(compute);
    communication - overlapped + 0.1 * overlapped
}

fn compute_only(forward: f64, backward_input: f64, backward_weight: f64) -> BlockTime {
    let wall = StageTime {
        forward,
        backward_input,
        backward_weight,
    };
    BlockTime {
        wall,
        compute: wall.total(),
        ..BlockTime::default()
    }
}

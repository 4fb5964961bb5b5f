//! How long a step takes, term by term.
//!
//! Blocks are priced by their operators, laid on a pipeline in closed form, and what data-parallel ranks
//! send is hidden behind backward as far as it goes. The same terms in the same order are what a report
//! shows, and they sum to the step.

use trainyard_schedule::{Costs, Kind, ScheduleError, Timeline, simulate};

use crate::activations::tokens;
use crate::block::BlockTime;
use crate::collective::{Group, Wires};
use crate::operator::Rates;
use crate::pipeline::{bubble, zero_bubble_h1};
use crate::{Calibration, Cluster, Holding, LocalParameters, Offload, Shape, StageTime, Strategy};

/// Seconds of a step, by what they are spent on. The terms sum to `likely`.
#[derive(Copy, Clone, Debug, Default, PartialEq)]
pub struct Time {
    /// Forward and backward of the slowest rank.
    pub compute: f64,
    /// Computing again what was not kept.
    pub recomputation: f64,
    /// Waiting for the program to launch kernels.
    pub launch: f64,
    /// Waiting for messages of shared matrices.
    pub tensor: f64,
    /// Waiting for keys and values of other positions.
    pub context: f64,
    /// Waiting for routed tokens.
    pub expert: f64,
    /// Waiting for messages between stages.
    pub pipeline: f64,
    /// Waiting for gradients and sharded parameters.
    pub data: f64,
    /// Waiting for other stages to have something to do.
    pub bubble: f64,
    /// The optimiser's step.
    pub optimizer: f64,
    /// Moving states to and from main memory.
    pub offload: f64,
    /// Where all that can travel beside computation does.
    pub low: f64,
    /// The sum of the terms.
    pub likely: f64,
    /// Where nothing does.
    pub high: f64,
}

impl Time {
    /// The terms with their names, in the order they are shown.
    pub const fn terms(&self) -> [(&'static str, f64); 11] {
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
        ]
    }

    fn closed(mut self, hidden: f64, spread: f64) -> Time {
        self.likely = self.terms().iter().map(|(_, seconds)| seconds).sum();
        self.low = (self.likely - self.data - self.pipeline) / (1.0 + spread);
        self.high = (self.likely + hidden) * (1.0 + spread);
        self
    }
}

/// What the ranks of one class do for one micro-batch.
#[derive(Copy, Clone, Debug, Default)]
struct RankTime {
    wall: StageTime,
    parts: BlockTime,
}

impl RankTime {
    fn add(&mut self, block: &BlockTime, count: f64) {
        self.wall.forward += count * block.wall.forward;
        self.wall.backward_input += count * block.wall.backward_input;
        self.wall.backward_weight += count * block.wall.backward_weight;
        let parts = &mut self.parts;
        parts.compute += count * block.compute;
        parts.recomputation += count * block.recomputation;
        parts.launch += count * block.launch;
        parts.tensor += count * block.tensor;
        parts.context += count * block.context;
        parts.expert += count * block.expert;
        parts.hidden += count * block.hidden;
    }
}

/// Everything that prices one strategy.
struct Pricing<'a> {
    shape: &'a Shape,
    strategy: &'a Strategy,
    cluster: &'a Cluster,
    calibration: &'a Calibration,
    rates: Rates<'a>,
    wires: Wires<'a>,
    /// Every class of ranks and its time.
    ranks: Vec<(Holding, RankTime)>,
}

/// How long a step takes, in closed form: microseconds to ask.
pub fn time(
    shape: &Shape,
    strategy: &Strategy,
    cluster: &Cluster,
    calibration: &Calibration,
) -> Time {
    let pricing = Pricing::new(shape, strategy, cluster, calibration);
    let slowest = pricing.slowest();
    let m = strategy.num_microbatches() as f64;
    let waits = pricing.bubble(&slowest);
    let (data, hidden_data) = pricing.data(&slowest);
    let (pipeline, hidden_pipeline) = pricing.between_stages();
    let parts = &slowest.parts;
    let hidden = m * parts.hidden + hidden_data + hidden_pipeline;
    Time {
        compute: m * parts.compute,
        recomputation: m * parts.recomputation,
        launch: m * parts.launch,
        tensor: m * parts.tensor,
        context: m * parts.context,
        expert: m * parts.expert,
        pipeline,
        data,
        bubble: waits,
        optimizer: pricing.optimizer(),
        offload: pricing.offload(),
        ..Time::default()
    }
    .closed(hidden, calibration.spread)
}

/// The same with every action of the pipeline followed, for the few strategies that are shown.
pub fn time_followed(
    shape: &Shape,
    strategy: &Strategy,
    cluster: &Cluster,
    calibration: &Calibration,
) -> Result<Time, ScheduleError> {
    let closed = time(shape, strategy, cluster, calibration);
    if strategy.degrees.pp == 1 {
        return Ok(closed);
    }
    let timeline = timeline(shape, strategy, cluster, calibration)?;
    let pricing = Pricing::new(shape, strategy, cluster, calibration);
    let m = strategy.num_microbatches();
    let busiest = m as f64 * pricing.slowest().wall.whole();
    let bubble = (timeline.end() - busiest).max(0.0);
    let moved = bubble - closed.bubble;
    Ok(Time {
        bubble,
        likely: closed.likely + moved,
        low: closed.low + moved / (1.0 + calibration.spread),
        high: closed.high + moved * (1.0 + calibration.spread),
        ..closed
    })
}

/// When every rank of a pipeline does what, in seconds.
pub fn timeline(
    shape: &Shape,
    strategy: &Strategy,
    cluster: &Cluster,
    calibration: &Calibration,
) -> Result<Timeline, ScheduleError> {
    let pricing = Pricing::new(shape, strategy, cluster, calibration);
    let (layers, m) = (&strategy.layers, strategy.num_microbatches());
    let schedule = layers
        .schedule
        .build(strategy.degrees.pp, m, layers.stages_per_rank)?;
    let each = (0..schedule.num_stages()).map(|stage| pricing.stage(stage));
    simulate(&schedule, &Costs::of_stages(&each.collect::<Vec<_>>()))
}

impl<'a> Pricing<'a> {
    fn new(
        shape: &'a Shape,
        strategy: &'a Strategy,
        cluster: &'a Cluster,
        calibration: &'a Calibration,
    ) -> Pricing<'a> {
        let constants = &calibration.constants;
        let mut pricing = Pricing {
            shape,
            strategy,
            cluster,
            calibration,
            rates: Rates {
                accelerator: &cluster.accelerator,
                constants,
            },
            wires: Wires { cluster, constants },
            ranks: Vec::new(),
        };
        let dense = pricing.block(false);
        let sparse = if shape.experts.is_some() {
            pricing.block(true)
        } else {
            dense
        };
        let holdings = strategy.holdings(shape).into_iter();
        pricing.ranks = holdings
            .map(|holding| (holding, pricing.rank(&holding, &dense, &sparse)))
            .collect();
        pricing
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

    fn rank(&self, holding: &Holding, dense: &BlockTime, sparse: &BlockTime) -> RankTime {
        let mut rank = RankTime::default();
        rank.add(dense, holding.num_dense as f64);
        rank.add(sparse, holding.num_sparse as f64);
        let chunks = self.strategy.layers.stages_per_rank as f64;
        rank.add(&self.host(chunks), 1.0);
        if holding.has_embedding {
            rank.add(&self.embedding(), 1.0);
        }
        if holding.has_head {
            rank.add(&self.head(), 1.0);
        }
        rank
    }

    /// What the program does around each stage.
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
        computing(
            self.rates.stream(10.0 * bytes),
            self.rates.stream(20.0 * bytes),
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
        let loss = self.rates.stream(tokens * vocab * per_logit);
        computing(
            self.rates.matmul(1.0, tokens, vocab, hidden) + loss / 2.0,
            self.rates.matmul(1.0, tokens, hidden, vocab) + loss / 2.0,
            self.rates.matmul(1.0, hidden, vocab, tokens),
        )
    }

    fn slowest(&self) -> RankTime {
        let by_wall = |a: &&(Holding, RankTime), b: &&(Holding, RankTime)| {
            a.1.wall.whole().total_cmp(&b.1.wall.whole())
        };
        let slowest = self.ranks.iter().max_by(by_wall);
        slowest.map_or_else(RankTime::default, |(_, rank)| *rank)
    }

    /// What other ranks' work adds to the slowest one's.
    fn bubble(&self, slowest: &RankTime) -> f64 {
        let pp = self.strategy.degrees.pp;
        if pp == 1 {
            return 0.0;
        }
        let m = self.strategy.num_microbatches();
        if self.strategy.layers.schedule == Kind::ZeroBubbleH1 && m >= 2 * pp {
            // Who keeps gradients of weights for the end, and so fills whose gaps, depends on the place.
            let wall = |place: usize| self.ranks[place.min(self.ranks.len() - 1)].1.wall;
            let ends = [wall(0), wall(1), wall(self.ranks.len() - 1)];
            let step = zero_bubble_h1(ends, pp, m);
            return (step - m as f64 * slowest.wall.whole()).max(0.0);
        }
        let mut sum = StageTime::default();
        let mut add = |wall: &StageTime, count: f64| {
            sum.forward += count * wall.forward;
            sum.backward_input += count * wall.backward_input;
            sum.backward_weight += count * wall.backward_weight;
        };
        for (place, (_, rank)) in self.ranks.iter().enumerate() {
            let alike = if place == 1 && pp > 2 { pp - 2 } else { 1 };
            add(&rank.wall, alike as f64);
        }
        add(&slowest.wall, -1.0);
        let others = (pp - 1) as f64;
        let other = StageTime {
            forward: sum.forward / others,
            backward_input: sum.backward_input / others,
            backward_weight: sum.backward_weight / others,
        };
        let layers = &self.strategy.layers;
        bubble(layers.schedule, pp, m, layers.stages_per_rank, other)
    }

    /// One stage's costs, as the simulation takes them.
    fn stage(&self, stage: usize) -> (f64, f64, f64) {
        let num_stages = self.strategy.num_stages();
        let num_blocks = self.shape.num_hidden_layers;
        let count = crate::blocks_of_stage(num_blocks, num_stages, stage) as f64;
        // Blocks of both kinds in the proportion the model has them.
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

    /// Messages between stages: what is waited for, and what travels beside computation.
    fn between_stages(&self) -> (f64, f64) {
        let degrees = &self.strategy.degrees;
        if degrees.pp == 1 {
            return (0.0, 0.0);
        }
        let bytes = tokens(self.strategy)
            * self.shape.hidden_size as f64
            * self.strategy.precision.compute as f64;
        let crosses = degrees.world_size() > self.cluster.per_machine;
        let (bytes, tp) = match self.strategy.sequence_parallel {
            true => (bytes / degrees.tp as f64, 1),
            false => (bytes, degrees.tp),
        };
        let message = 2.0 * self.wires.send(crosses, bytes, tp);
        let through = (degrees.pp - 1) as f64 * message;
        let chunks = self.strategy.layers.stages_per_rank as f64;
        let steady = (self.strategy.num_microbatches() as f64 - 1.0) * chunks * message;
        match self.calibration.software.overlaps_data {
            true => (through, steady),
            false => (through + steady, 0.0),
        }
    }

    /// The parameters of the rank that has most.
    fn local(&self) -> LocalParameters {
        let each = self.ranks.iter();
        let each = each.map(|(holding, _)| LocalParameters::of(self.shape, self.strategy, holding));
        each.fold(LocalParameters::default(), |most, one| {
            match one.dense + one.experts > most.dense + most.experts {
                true => one,
                false => most,
            }
        })
    }

    /// Gradients and sharded parameters: what is waited for, and what travels beside computation.
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
        let begin = self.calibration.constants.data_latency + tied;
        if !self.calibration.software.overlaps_data {
            return (once + steady + begin, 0.0);
        }
        // What travels once a step hides behind the last micro-batch's backward; the rest behind all.
        let wall = &slowest.wall;
        let m = self.strategy.num_microbatches() as f64;
        let last = wall.backward_input + wall.backward_weight;
        let waited = beside(once, last) + beside(steady, m * wall.whole());
        (waited + begin, once + steady - waited)
    }

    /// Seconds of what is sent once a step, and of what is sent for every micro-batch.
    fn traffic(&self, parameters: f64, shard: Group, ranks: usize) -> (f64, f64) {
        let degrees = &self.strategy.degrees;
        let wire = self.calibration.software.gradient_on_wire as f64;
        let copies = Group::new(
            self.cluster,
            degrees.dp_replicate,
            degrees.dp_shard * degrees.cp * degrees.tp,
        );
        let gradients = parameters * wire;
        let values = parameters * self.strategy.precision.compute as f64;
        let wires = &self.wires;
        let share = 1.0 / ranks.max(1) as f64;
        let between_copies = wires.all_reduce(copies, gradients * share);
        let m = self.strategy.num_microbatches() as f64;
        match self.strategy.zero_stage {
            0 => (
                wires.all_reduce(shard, gradients) + wires.all_reduce(copies, gradients),
                0.0,
            ),
            1 => {
                let there_and_back = wires.gather(shard, gradients) + wires.gather(shard, values);
                (there_and_back + between_copies, 0.0)
            }
            2 => (
                wires.gather(shard, values) + between_copies,
                m * wires.gather(shard, gradients),
            ),
            _ => {
                let each = 2.0 * wires.gather(shard, values) + wires.gather(shard, gradients);
                (between_copies, m * each)
            }
        }
    }

    /// A tied table lies at both ends of a pipeline, whose gradients are summed.
    fn tied(&self) -> f64 {
        if self.strategy.degrees.pp == 1 || !self.shape.tie_word_embeddings {
            return 0.0;
        }
        let crosses = self.strategy.degrees.world_size() > self.cluster.per_machine;
        let group = Group {
            size: 2,
            in_machine: if crosses { 1 } else { 2 },
        };
        let table = self.shape.embedding() as f64 / self.strategy.degrees.tp as f64;
        let wire = self.calibration.software.gradient_on_wire as f64;
        self.wires.all_reduce(group, table * wire)
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
        let passes = self.rates.stream(parameters * each * constants.optimizer);
        passes + constants.optimizer_host
    }

    /// States that lie in main memory come and go over the machine's bus, or at a disk's pace.
    fn offload(&self) -> f64 {
        let pace = match self.strategy.offload {
            Offload::None => return 0.0,
            Offload::Cpu => self.cluster.accelerator.host.value,
            Offload::Nvme => DISK.min(self.cluster.accelerator.host.value),
        };
        let (precision, degrees) = (&self.strategy.precision, &self.strategy.degrees);
        let local = self.local();
        let parameters = local.dense / (degrees.dp_shard * degrees.cp) as f64
            + local.experts / degrees.expert_shard().max(1) as f64;
        let states = 2.0 * parameters * precision.optimizer as f64;
        let m = self.strategy.num_microbatches() as f64;
        let values = 2.0 * m * parameters * precision.compute as f64;
        (states + values) / pace
    }
}

/// Bytes per second of one rank's share of a machine's disks: an assumption, a quarter of one fast disk.
const DISK: f64 = 1.5e9;

/// What is waited for of messages that travel beside computation: what is longer than it, and a tenth of
/// what is hidden, because both use the same memory and processors.
fn beside(messages: f64, computation: f64) -> f64 {
    let hidden = messages.min(computation);
    messages - hidden + 0.1 * hidden
}

fn computing(forward: f64, backward_input: f64, backward_weight: f64) -> BlockTime {
    let wall = StageTime {
        forward,
        backward_input,
        backward_weight,
    };
    BlockTime {
        wall,
        compute: wall.whole(),
        ..BlockTime::default()
    }
}

//! Every way to split a step that can be meant, the fastest that fit, and what was nearly one of them.
//!
//! A way is first asked for its memory, then for a bound below which its time cannot be, and only then
//! priced. Plans are the fastest of every mesh, so that what comes second is another mesh and not the same
//! with another knob; the front has those too that are slower and need less.

use std::cmp::Ordering;
use std::collections::{HashMap, HashSet};

use trainyard_schedule::Kind;

use crate::flops::matrix_flops;
use crate::{
    AttentionKernel, Calibration, Cluster, Degrees, Held, Layers, Memory, Offload, Overheads,
    Recompute, Shape, Strategy, Time, blocks_of_stage, memory, peak, time, time_followed,
};

/// What is asked.
#[derive(Clone, Debug)]
pub struct Question {
    /// The model.
    pub shape: Shape,
    /// The machines.
    pub cluster: Cluster,
    /// The program and how far it stays behind data sheets.
    pub calibration: Calibration,
    /// What no tensor accounts for.
    pub overheads: Overheads,
    /// Samples in a step.
    pub global_batch: usize,
    /// Tokens of a sample.
    pub seq_len: usize,
    /// In which types things are held and computed.
    pub held: Held,
    /// Whether fewer machines may be used, for the sake of cost.
    pub fewer_machines: bool,
}

/// A strategy and what it costs.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// The way to split.
    pub strategy: Strategy,
    /// Seconds of a step.
    pub time: Time,
    /// Bytes of the rank that needs most.
    pub memory: Memory,
}

impl Plan {
    /// Seconds times accelerators: what a step is paid for.
    pub fn cost(&self) -> f64 {
        self.time.likely * self.strategy.degrees.world_size() as f64
    }

    fn is_beaten_by(&self, other: &Plan) -> bool {
        let pair = |plan: &Plan| [plan.time.likely, plan.memory.total(), plan.cost()];
        let (own, theirs) = (pair(self), pair(other));
        let never_worse = theirs.iter().zip(&own).all(|(a, b)| a <= b);
        never_worse && theirs.iter().zip(&own).any(|(a, b)| a < b)
    }
}

/// What a search found.
#[derive(Clone, Debug, Default)]
pub struct Found {
    /// The fastest of every mesh that fits, fastest first.
    pub plans: Vec<Plan>,
    /// Those that no other beats in time, memory and cost at once.
    pub front: Vec<Plan>,
    /// The fastest that would be chosen with up to twice the memory, if it is faster than what fits.
    pub with_more_memory: Option<Plan>,
    /// Where nothing fits: what is missing least.
    pub nearest_miss: Option<Plan>,
    /// Ways looked at.
    pub num_considered: usize,
    /// Ways that do not fit.
    pub num_too_large: usize,
    /// Ways that fit and were priced in full.
    pub num_priced: usize,
}

/// Meshes whose fastest plans are followed action by action.
const FINALISTS: usize = 8;

/// Looks at every way there is.
pub fn search(question: &Question) -> Found {
    let mut hunt = Hunt::new(question);
    hunt.all(Offload::None);
    if hunt.best.is_empty() {
        hunt.all(Offload::Cpu);
    }
    hunt.finish()
}

/// The fastest way with these sizes of axes; where none fits, the one that lacks least.
pub fn search_mesh(question: &Question, degrees: Degrees) -> Option<Plan> {
    let shares = degrees.dp_shard * degrees.cp > 1;
    let replicas = degrees.data_parallel();
    let is_even = replicas > 0 && question.global_batch.is_multiple_of(replicas);
    let is_whole = degrees.pp <= question.shape.num_hidden_layers
        && degrees.tp > 0
        && shares_heads(&question.shape, degrees.tp)
        && question.seq_len.is_multiple_of(degrees.cp)
        && experts_fit(question, &degrees);
    if !is_even || !is_whole {
        return None;
    }
    for offload in [Offload::None, Offload::Cpu] {
        let mut hunt = Hunt::new(question);
        let stages = match offload {
            Offload::None if shares => 0..=3,
            Offload::None => 0..=0,
            _ => 3..=3,
        };
        for zero_stage in stages {
            hunt.mesh(degrees, zero_stage, offload);
        }
        let found = hunt.finish();
        let is_last = offload == Offload::Cpu;
        let miss = found.nearest_miss.filter(|_| is_last);
        if let Some(plan) = found.plans.into_iter().next().or(miss) {
            return Some(plan);
        }
    }
    None
}

struct Hunt<'a> {
    question: &'a Question,
    /// Operations of a step's matrix products.
    matrix_flops: f64,
    /// The fastest that fits of every mesh, stage of sharding and recomputation, which trade time for bytes.
    best: HashMap<(Degrees, usize, Recompute), Plan>,
    /// The fastest so far that fits, in seconds.
    fastest: f64,
    with_more_memory: Option<Plan>,
    nearest_miss: Option<Plan>,
    found: Found,
}

impl<'a> Hunt<'a> {
    fn new(question: &'a Question) -> Hunt<'a> {
        Hunt {
            question,
            matrix_flops: matrix_flops(&question.shape, question.global_batch * question.seq_len),
            best: HashMap::new(),
            fastest: f64::INFINITY,
            with_more_memory: None,
            nearest_miss: None,
            found: Found::default(),
        }
    }

    fn all(&mut self, offload: Offload) {
        let question = self.question;
        for degrees in meshes(question) {
            for (zero_stage, dp_replicate) in sharings(question, &degrees, offload) {
                let degrees = Degrees {
                    dp_replicate,
                    dp_shard: degrees.dp_shard / dp_replicate,
                    ..degrees
                };
                if !experts_fit(question, &degrees) {
                    continue;
                }
                self.mesh(degrees, zero_stage, offload);
            }
        }
    }

    fn mesh(&mut self, degrees: Degrees, zero_stage: usize, offload: Offload) {
        let question = self.question;
        let each = question.global_batch / degrees.data_parallel();
        for micro_batch in powers(each).filter(|size| each.is_multiple_of(*size)) {
            let num_microbatches = each / micro_batch;
            for layers in layouts(&question.shape, degrees.pp, num_microbatches) {
                for &recompute in recomputations(question) {
                    self.consider(Strategy {
                        degrees,
                        zero_stage,
                        sequence_parallel: degrees.tp > 1,
                        layers,
                        global_batch: question.global_batch,
                        micro_batch,
                        seq_len: question.seq_len,
                        recompute,
                        offload,
                        precision: question.held.at(zero_stage),
                    });
                }
            }
        }
    }

    fn consider(&mut self, strategy: Strategy) {
        let Question {
            shape,
            cluster,
            calibration,
            overheads,
            ..
        } = self.question;
        self.found.num_considered += 1;
        let all = memory(shape, &strategy, &calibration.software, overheads);
        let Some(&memory) = peak(&all) else { return };
        let room = cluster.accelerator.memory.value;
        let fits = memory.total() <= room;
        if !fits {
            self.found.num_too_large += 1;
            self.remember_miss(&strategy, memory);
        }
        let to_beat = self.to_beat(&strategy, fits);
        let bound = lower_bound(self.question, self.matrix_flops, &strategy);
        if memory.total() > 2.0 * room || bound >= to_beat {
            return;
        }
        self.found.num_priced += 1;
        let time = time(shape, &strategy, cluster, calibration);
        if time.likely < to_beat {
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

    /// Seconds that a way must stay below to be remembered.
    fn to_beat(&self, strategy: &Strategy, fits: bool) -> f64 {
        let seconds = |plan: Option<&Plan>| plan.map_or(f64::INFINITY, |plan| plan.time.likely);
        match fits {
            true => seconds(self.best.get(&key(strategy))),
            false => seconds(self.with_more_memory.as_ref()).min(self.fastest),
        }
    }

    fn keep(&mut self, plan: Plan, fits: bool) {
        if fits {
            self.fastest = self.fastest.min(plan.time.likely);
            self.best.insert(key(&plan.strategy), plan);
        } else {
            self.with_more_memory = Some(plan);
        }
    }

    fn remember_miss(&mut self, strategy: &Strategy, most: Memory) {
        let known = self.nearest_miss.as_ref();
        if known.is_some_and(|plan| plan.memory.total() <= most.total()) {
            return;
        }
        self.nearest_miss = Some(Plan {
            strategy: strategy.clone(),
            time: Time::default(),
            memory: most,
        });
    }

    fn finish(mut self) -> Found {
        let question = self.question;
        let mut all: Vec<Plan> = self.best.into_values().collect();
        all.sort_by(by_time);
        let mut unbeaten = front(&all);
        let mut seen = HashSet::new();
        all.retain(|plan| seen.insert(plan.strategy.degrees));
        for plan in all.iter_mut().take(FINALISTS) {
            plan.time = followed(question, plan);
        }
        all.sort_by(by_time);
        for plan in &mut unbeaten {
            plan.time = followed(question, plan);
        }
        // Followed, some of them are beaten after all.
        unbeaten.extend(all.iter().take(FINALISTS).cloned());
        unbeaten.sort_by(by_time);
        unbeaten.dedup_by(|a, b| a.strategy == b.strategy);
        self.found.front = front(&unbeaten);
        let fastest = all.first().map_or(f64::INFINITY, |plan| plan.time.likely);
        let more = self.with_more_memory;
        self.found.with_more_memory = more.filter(|plan| plan.time.likely < fastest);
        let miss = self.nearest_miss.filter(|_| all.is_empty());
        self.found.nearest_miss = miss.map(|plan| Plan {
            time: followed(question, &plan),
            ..plan
        });
        self.found.plans = all;
        self.found
    }
}

const fn key(strategy: &Strategy) -> (Degrees, usize, Recompute) {
    (strategy.degrees, strategy.zero_stage, strategy.recompute)
}

/// The faster first; of equally fast ones always the same.
fn by_time(a: &Plan, b: &Plan) -> Ordering {
    let seconds = a.time.likely.total_cmp(&b.time.likely);
    let bytes = a.memory.total().total_cmp(&b.memory.total());
    let degrees = a.strategy.degrees.cmp(&b.strategy.degrees);
    seconds.then(bytes).then(degrees)
}

/// Its time with every action followed; the closed form where a schedule cannot be built.
pub(crate) fn followed(question: &Question, plan: &Plan) -> Time {
    let Question {
        shape,
        cluster,
        calibration,
        ..
    } = question;
    time_followed(shape, &plan.strategy, cluster, calibration)
        .unwrap_or_else(|_| time(shape, &plan.strategy, cluster, calibration))
}

/// Those that no other beats, fastest first.
fn front(plans: &[Plan]) -> Vec<Plan> {
    let unbeaten = |plan: &&Plan| !plans.iter().any(|other| plan.is_beaten_by(other));
    plans.iter().filter(unbeaten).cloned().collect()
}

/// Sizes of all axes, with all data-parallel ranks in `dp_shard`. `tp` stays inside a machine.
fn meshes(question: &Question) -> Vec<Degrees> {
    let (shape, cluster) = (&question.shape, &question.cluster);
    let mut found = Vec::new();
    if question.seq_len == 0 {
        return found;
    }
    let mut worlds = vec![cluster.world_size()];
    if question.fewer_machines {
        let machines = powers(cluster.num_machines / 2);
        worlds.extend(machines.map(|count| count * cluster.per_machine));
    }
    for world in worlds {
        for tp in divisors(cluster.per_machine.min(world)) {
            if !shares_heads(shape, tp) || !world.is_multiple_of(tp) {
                continue;
            }
            // Fewer than 2,048 positions on a rank leave it too little to do.
            let most = (question.seq_len / 2048).max(1);
            for cp in powers(most).filter(|cp| (world / tp).is_multiple_of(*cp)) {
                let left = world / tp / cp;
                let depths = 1..=left.min(shape.num_hidden_layers);
                for pp in depths.filter(|pp| left.is_multiple_of(*pp)) {
                    let dp_shard = left / pp;
                    if !question.global_batch.is_multiple_of(dp_shard) {
                        continue;
                    }
                    let degrees = Degrees {
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

/// Every rank has whole heads; latents are nobody's own.
fn shares_heads(shape: &Shape, tp: usize) -> bool {
    let has_pairs = shape.latent.is_some() || shape.num_key_value_heads.is_multiple_of(tp);
    shape.num_attention_heads.is_multiple_of(tp) && has_pairs
}

fn expert_degrees(shape: &Shape, degrees: &Degrees) -> Vec<usize> {
    let Some(experts) = &shape.experts else {
        return vec![1];
    };
    let over = degrees.dp_shard * degrees.cp * degrees.tp;
    let all = divisors(experts.num_experts).into_iter();
    all.filter(|ep| over.is_multiple_of(*ep)).collect()
}

fn experts_fit(question: &Question, degrees: &Degrees) -> bool {
    let over = degrees.dp_shard * degrees.cp * degrees.tp;
    question.shape.experts.is_none() || over.is_multiple_of(degrees.ep)
}

/// Stages of sharding, and how many copies share nothing: one, or one per machine's worth of ranks.
fn sharings(question: &Question, degrees: &Degrees, offload: Offload) -> Vec<(usize, usize)> {
    let ranks = degrees.dp_shard;
    if ranks == 1 && degrees.cp == 1 {
        let stage = if offload == Offload::None { 0 } else { 3 };
        return vec![(stage, 1)];
    }
    let stages: &[usize] = match offload {
        Offload::None => &[0, 1, 2, 3],
        _ => &[3],
    };
    let inside = (question.cluster.per_machine / (degrees.tp * degrees.cp)).max(1);
    let mut found: Vec<(usize, usize)> = stages.iter().map(|stage| (*stage, 1)).collect();
    if inside > 1 && ranks > inside && ranks.is_multiple_of(inside) {
        let copies = ranks / inside;
        let sharded = stages.iter().filter(|stage| **stage > 0);
        found.extend(sharded.map(|stage| (*stage, copies)));
    }
    found
}

/// Schedules that suit the blocks and micro-batches.
fn layouts(shape: &Shape, pp: usize, num_microbatches: usize) -> Vec<Layers> {
    let layout = |schedule, stages_per_rank| Layers {
        schedule,
        stages_per_rank,
    };
    if pp == 1 {
        return vec![layout(Kind::OneForwardOneBackward, 1)];
    }
    let num_blocks = shape.num_hidden_layers;
    let most = num_blocks.div_ceil(pp);
    let mut found = vec![
        layout(Kind::OneForwardOneBackward, 1),
        layout(Kind::ZeroBubbleH1, 1),
    ];
    if num_microbatches.is_multiple_of(pp) {
        let even = |chunks: &usize| {
            let num_stages = pp * chunks;
            // No stage has a block more than another, ends aside.
            let largest = (0..2.min(num_stages))
                .map(|stage| blocks_of_stage(num_blocks, num_stages, stage))
                .max();
            largest.is_some_and(|largest| largest * num_stages <= num_blocks + 2)
        };
        let chunks = (2..=most).filter(even);
        found.extend(chunks.map(|chunks| layout(Kind::Interleaved, chunks)));
    }
    if most >= 2 && num_microbatches >= 2 * pp {
        found.push(layout(Kind::ZeroBubbleV, 2));
    }
    found
}

/// With flash attention there is nothing to gain from computing attention alone again.
fn recomputations(question: &Question) -> &'static [Recompute] {
    match question.calibration.software.attention {
        AttentionKernel::Flash => &[Recompute::None, Recompute::Full],
        AttentionKernel::Materialised => &[Recompute::None, Recompute::Selective, Recompute::Full],
    }
}

/// Seconds that a step cannot be faster than: its matrix products at the rate of very large ones, spread
/// evenly, and the bubble that so much work leaves.
fn lower_bound(question: &Question, matrix_flops: f64, strategy: &Strategy) -> f64 {
    let accelerator = &question.cluster.accelerator;
    let rate = accelerator.peak.value * question.calibration.constants.matmul;
    let Strategy {
        degrees, layers, ..
    } = strategy;
    let waits = match layers.schedule {
        Kind::OneForwardOneBackward | Kind::Interleaved => {
            let slots = (strategy.num_microbatches() * layers.stages_per_rank) as f64;
            (degrees.pp - 1) as f64 / slots
        }
        _ => 0.0,
    };
    matrix_flops / (degrees.world_size() as f64 * rate) * (1.0 + waits)
}

/// 1, 2, 4 and so on, up to a number.
fn powers(most: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(1usize), |power| power.checked_mul(2))
        .take_while(move |power| *power <= most)
}

fn divisors(number: usize) -> Vec<usize> {
    (1..=number).filter(|d| number.is_multiple_of(*d)).collect()
}

#[cfg(test)]
mod tests {
    use trainyard_config::{Flavor, LlamaConfig};

    use super::*;
    use crate::Software;

    #[test]
    fn nothing_is_faster_than_its_bound() {
        let cluster: Cluster = "64xH100".parse().unwrap();
        let question = Question {
            shape: Shape::from(&LlamaConfig::of(Flavor::Llama3_8b)),
            calibration: Calibration::of(&cluster.accelerator, Software::MODERN),
            cluster,
            overheads: Overheads::default(),
            global_batch: 256,
            seq_len: 8192,
            held: Held::same(crate::Precision::BF16),
            fewer_machines: true,
        };
        let found = search(&question);
        assert!(found.plans.len() > 20 && !found.front.is_empty());
        let flops = matrix_flops(&question.shape, 256 * 8192);
        for plan in &found.plans {
            let bound = lower_bound(&question, flops, &plan.strategy);
            assert!(bound > 0.0 && bound <= plan.time.likely);
        }
        let first = &found.front[0];
        let mut rest = found.front.iter();
        assert!(rest.all(|plan| plan.time.likely >= first.time.likely));
        assert!(found.front.iter().any(|plan| plan.cost() < first.cost()));
    }
}

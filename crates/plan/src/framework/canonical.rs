//! One form for strategies and shapes that mean the same.
//!
//! Some choices mean nothing beside others: a schedule without a pipeline, a ZeRO stage where one rank has
//! all states. Texts do not carry them, so before anything is compared or written they are set to what a
//! reader will find.

use trainyard_schedule::Kind;

use super::{Framework, FrameworkError};
use crate::{Degrees, Experts, Layers, Offload, Shape, Strategy};

/// More ranks than anybody has; beyond it a number is a slip.
const MOST_RANKS: usize = 1 << 24;

/// More stages than a rank can have layers.
const MOST_STAGES: usize = 1 << 12;

/// More samples or tokens than anybody has in a step.
const MOST: usize = 1 << 40;

/// The strategy with every meaningless choice at its plainest.
pub(super) fn canonical(strategy: &Strategy) -> Strategy {
    let mut s = strategy.clone();
    s.layers = canonical_layers(s.layers, s.degrees.pp);
    s.sequence_parallel &= s.degrees.tp > 1;
    if s.degrees.dp_shard * s.degrees.cp == 1 && s.offload == Offload::None {
        s.zero_stage = 0;
    }
    if s.zero_stage == 0 {
        // Nothing is sharded, so copies and shards are the same ranks; experts are laid over shards.
        let all = s.degrees.data_parallel();
        let has_experts = s.degrees.ep > 1;
        s.degrees.dp_shard = if has_experts { all } else { 1 };
        s.degrees.dp_replicate = if has_experts { 1 } else { all };
    }
    s
}

fn canonical_layers(layers: Layers, pp: usize) -> Layers {
    let one = |schedule| Layers {
        schedule,
        stages_per_rank: 1,
    };
    match (layers.schedule, layers.stages_per_rank) {
        _ if pp == 1 => one(Kind::OneForwardOneBackward),
        (Kind::Interleaved, 1) => one(Kind::OneForwardOneBackward),
        (Kind::LoopedBreadthFirst, 1) => one(Kind::GPipe),
        (kind, stages) => Layers {
            schedule: kind,
            stages_per_rank: kind.num_chunks().unwrap_or(stages),
        },
    }
}

/// The shape with several shared experts as one of their width together, and biases told once.
pub(super) fn canonical_shape(shape: &Shape) -> Shape {
    let mut shape = shape.clone();
    shape.attention_bias |= shape.has_biases;
    shape.experts = shape.experts.map(|experts| {
        let shared = experts.num_shared_experts * experts.shared_intermediate_size;
        Experts {
            num_shared_experts: usize::from(shared > 0),
            shared_intermediate_size: shared,
            has_shared_gate: experts.has_shared_gate && shared > 0,
            ..experts
        }
    });
    shape
}

/// Whether two shapes are the same model: names and the longest sequence aside.
pub(super) fn is_same_model(a: &Shape, b: &Shape) -> bool {
    let plain = |shape: &Shape| Shape {
        name: String::new(),
        max_position_embeddings: 0,
        ..canonical_shape(shape)
    };
    plain(a) == plain(b)
}

/// Refuses degrees that are no numbers of ranks. Products of degrees that pass do not overflow.
pub(super) fn check_degrees(framework: Framework, d: &Degrees) -> Result<(), FrameworkError> {
    let degrees = [d.pp, d.dp_replicate, d.dp_shard, d.cp, d.tp];
    let ranks = degrees.iter().try_fold(1usize, |product, &degree| {
        product.checked_mul(degree).filter(|&n| n <= MOST_RANKS)
    });
    if ranks.is_some_and(|ranks| ranks > 0) && (1..=MOST_RANKS).contains(&d.ep) {
        return Ok(());
    }
    Err(framework.refusal(
        format!("degrees {degrees:?}, ep {}", d.ep),
        "every degree is at least 1, and their product a number of ranks",
        "use degrees of 1 and more",
    ))
}

/// Refuses strategies that contradict themselves, whoever is to carry them out.
pub(super) fn check(
    framework: Framework,
    shape: Option<&Shape>,
    s: &Strategy,
) -> Result<(), FrameworkError> {
    check_degrees(framework, &s.degrees)?;
    check_batch(framework, s)?;
    if !(1..=MOST_STAGES).contains(&s.layers.stages_per_rank) || s.zero_stage > 3 {
        return Err(framework.refusal(
            format!(
                "{} stages per rank, ZeRO stage {}",
                s.layers.stages_per_rank, s.zero_stage
            ),
            "there is none such",
            format!("use 1 to {MOST_STAGES} stages per rank, and stages 0 to 3 of ZeRO"),
        ));
    }
    let d = &s.degrees;
    let over = d.dp_shard * d.cp * d.tp;
    let experts = format!("{} ranks that share the experts", d.ep);
    if !over.is_multiple_of(d.ep) {
        return Err(framework.refusal(
            experts,
            "they are laid over dp_shard x cp x tp, which they do not divide",
            format!("use a divisor of {over}"),
        ));
    }
    if d.ep > 1 && shape.is_some_and(|shape| shape.experts.is_none()) {
        return Err(framework.refusal(experts, "the model has none", "use 1"));
    }
    Ok(())
}

/// Refuses batches that the ranks cannot share. Expects checked degrees.
fn check_batch(framework: Framework, s: &Strategy) -> Result<(), FrameworkError> {
    let (global, micro) = (s.global_batch, s.micro_batch);
    let sizes = [global, micro, s.seq_len];
    if sizes.iter().any(|size| !(1..=MOST).contains(size)) {
        return Err(framework.refusal(
            format!(
                "a batch of {global}, {micro} at a time, of {} tokens",
                s.seq_len
            ),
            "no such step can be computed",
            format!("use 1 to {MOST}"),
        ));
    }
    let ranks = s.degrees.data_parallel();
    let at_once = ranks.saturating_mul(micro);
    if global.is_multiple_of(at_once) {
        return Ok(());
    }
    let nearest = at_once.saturating_mul((global / at_once).max(1));
    Err(framework.refusal(
        format!("a batch of {global}"),
        format!("{ranks} ranks of {micro} samples take {at_once} at a time"),
        format!("the nearest batch is {nearest}"),
    ))
}

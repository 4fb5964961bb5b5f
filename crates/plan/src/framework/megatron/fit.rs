//! From any strategy to the nearest that Megatron-LM can be told.

use trainyard_schedule::Kind;

use super::super::fit::Fit;
use super::super::{Choice, FrameworkError};
use super::{BF16, BF16_GRADIENTS, FP32, FRAMEWORK};
use crate::{Layers, Offload, Recompute, Shape, Strategy};

pub(super) fn fit(shape: &Shape, strategy: &Strategy) -> Result<Fit, FrameworkError> {
    let mut fit = Fit::new(shape, strategy);
    if fit.strategy.offload != Offload::None {
        let why = "it can move the optimiser's states to main memory (--optimizer-cpu-offload), but no weights";
        fit.change(Choice::Offload, why, "no offloading", |s| {
            s.offload = Offload::None
        });
    }
    let why = "weights have a copy of their own beside the optimiser's";
    fit.choose_precision(&[BF16, BF16_GRADIENTS, FP32], why);
    let s = &fit.strategy;
    if fit.shape.experts.is_some() && s.degrees.tp > 1 && !s.sequence_parallel {
        let why = "experts under tensor parallelism need shared positions";
        fit.change(Choice::SequenceParallel, why, "--sequence-parallel", |s| {
            s.sequence_parallel = true;
        });
    }
    if fit.strategy.recompute == Recompute::Products {
        let why = "it recomputes parts of blocks that it names, and not every second product";
        let written = "full recomputation, which keeps less and computes more again";
        fit.change(Choice::Recompute, why, written, |s| {
            s.recompute = Recompute::Full
        });
    }
    fit_schedule(&mut fit);
    fit_vocabulary(&mut fit);
    check_shape(&fit.shape, &fit.strategy)?;
    Ok(fit)
}

fn fit_schedule(fit: &mut Fit) {
    let s = &fit.strategy;
    let Layers {
        schedule,
        stages_per_rank,
    } = s.layers;
    let to_one = |s: &mut Strategy| {
        s.layers = Layers {
            schedule: Kind::OneForwardOneBackward,
            stages_per_rank: 1,
        };
    };
    match schedule {
        Kind::OneForwardOneBackward => return,
        Kind::Interleaved => {}
        Kind::LoopedBreadthFirst => {
            let written = format!("interleaved with {stages_per_rank} stages per rank");
            let why = "it knows 1F1B and interleaved 1F1B only";
            fit.change(Choice::Schedule, why, written, |s| {
                s.layers.schedule = Kind::Interleaved
            });
        }
        Kind::GPipe | Kind::ZeroBubbleH1 | Kind::ZeroBubbleV | Kind::DualPipeV => {
            let why = format!("{schedule} is none of its schedules");
            fit.change(Choice::Schedule, why, "1F1B", to_one);
            return;
        }
    }
    if let Err(FrameworkError::Refused { why, .. }) = check_interleaving(&fit.strategy) {
        fit.change(Choice::Schedule, why, "1F1B", to_one);
        return;
    }
    let pp = fit.strategy.degrees.pp;
    let layers = fit.shape.num_hidden_layers;
    if !is_even(layers, pp.saturating_mul(stages_per_rank)) {
        let why =
            format!("{layers} layers are not shared evenly by {pp} x {stages_per_rank} stages");
        fit.change(Choice::Schedule, why, "1F1B", to_one);
    }
}

fn fit_vocabulary(fit: &mut Fit) {
    let (size, tp) = (fit.shape.vocab_size, fit.strategy.degrees.tp);
    if size.is_multiple_of(tp) {
        return;
    }
    let padded = size.next_multiple_of(tp);
    let shape = Shape {
        vocab_size: padded,
        ..fit.shape.clone()
    };
    let why = format!("a vocabulary of {size} is not shared evenly by {tp} ranks");
    fit.change_model(why, format!("--padded-vocab-size {padded}"), shape);
}

/// Refuses interleaving that Megatron's schedule cannot do.
pub(super) fn check_interleaving(s: &Strategy) -> Result<(), FrameworkError> {
    let (pp, m) = (s.degrees.pp, s.num_microbatches());
    if s.layers.stages_per_rank < 2 || pp < 2 || m.is_multiple_of(pp) {
        return Ok(());
    }
    Err(FRAMEWORK.refusal(
        format!("{} stages per rank", s.layers.stages_per_rank),
        format!(
            "interleaving needs micro-batches divisible by the {pp} ranks of the pipeline, not {m}"
        ),
        format!("use 1, or {} micro-batches", m.next_multiple_of(pp)),
    ))
}

/// Whether layers, or layers and both ends, make so many equal stages.
fn is_even(layers: usize, stages: usize) -> bool {
    stages > 0 && (layers.is_multiple_of(stages) || (layers + 2).is_multiple_of(stages))
}

/// Whether the ends must count as layers for stages to be equal.
pub(super) fn counts_ends(shape: &Shape, s: &Strategy) -> bool {
    let stages = s.degrees.pp.saturating_mul(s.layers.stages_per_rank);
    stages > 0 && !shape.num_hidden_layers.is_multiple_of(stages)
}

/// Refuses shapes that the ranks cannot share.
pub(super) fn check_shape(shape: &Shape, s: &Strategy) -> Result<(), FrameworkError> {
    let d = &s.degrees;
    let stages = d.pp.saturating_mul(s.layers.stages_per_rank);
    let layers = shape.num_hidden_layers;
    if d.pp > 1 && !is_even(layers, stages) {
        let most = stages.min(layers + 2);
        let nearest = (1..=most).rev().find(|&n| is_even(layers, n)).unwrap_or(1);
        return Err(FRAMEWORK.refusal(
            format!("{stages} stages"),
            format!(
                "neither {layers} layers nor {} with both ends are shared evenly",
                layers + 2
            ),
            format!("use {nearest} stages"),
        ));
    }
    for (what, number, ranks) in [
        ("attention heads", shape.num_attention_heads, d.tp),
        ("the feed-forward width", shape.intermediate_size, d.tp),
        (
            "experts",
            shape.experts.as_ref().map_or(d.ep, |e| e.num_experts),
            d.ep,
        ),
        (
            "the sequence's length (two parts a rank)",
            s.seq_len,
            if d.cp > 1 { 2 * d.cp } else { 1 },
        ),
        (
            "positions of a rank",
            s.seq_len / d.cp,
            if s.sequence_parallel { d.tp } else { 1 },
        ),
    ] {
        if !number.is_multiple_of(ranks) {
            let most = ranks.min(number);
            let nearest = (1..=most)
                .rev()
                .find(|&n| number.is_multiple_of(n))
                .unwrap_or(1);
            return Err(FRAMEWORK.refusal(
                format!("{what}, {number}"),
                format!("not shared evenly by {ranks}"),
                format!("the nearest number that divides it is {nearest}"),
            ));
        }
    }
    let kv = shape.num_key_value_heads;
    if kv == 0 || !(kv.is_multiple_of(d.tp) || d.tp.is_multiple_of(kv)) {
        return Err(FRAMEWORK.refusal(
            format!("{kv} key/value heads"),
            format!("neither shared nor repeated evenly by {} ranks", d.tp),
            "use a degree that divides them",
        ));
    }
    if s.seq_len > shape.max_position_embeddings {
        return Err(FRAMEWORK.refusal(
            format!("sequences of {}", s.seq_len),
            format!("the model accepts {}", shape.max_position_embeddings),
            format!("use {}", shape.max_position_embeddings),
        ));
    }
    Ok(())
}

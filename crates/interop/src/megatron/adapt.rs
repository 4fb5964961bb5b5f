//! Adapts a strategy to what Megatron-LM's flags can express.

use trainyard_arch::DecoderConfig;
use trainyard_schedule::ScheduleKind;

use super::super::adapt::Adapted;
use super::super::{FrameworkError, Setting};
use super::{BF16, BF16_GRADIENTS, FP32, FRAMEWORK};
use trainyard_plan::{Offload, PipelineLayout, Recompute, Strategy};

pub(super) fn adapt(shape: &DecoderConfig, strategy: &Strategy) -> Result<Adapted, FrameworkError> {
    let mut adapted = Adapted::new(shape, strategy);
    adapted.leave_out_family_details();
    adapted.synchronize_in_every_step();
    if adapted.strategy.offload != Offload::None {
        let why =
            "Megatron can offload optimizer states (--optimizer-cpu-offload), but not weights";
        adapted.change(Setting::Offload, why, "no offloading", |s| {
            s.offload = Offload::None
        });
    }
    let why = "Megatron keeps weights beside the optimizer's fp32 copy";
    adapted.choose_precision(&[BF16, BF16_GRADIENTS, FP32], why);
    let s = &adapted.strategy;
    if adapted.shape.moe.is_some() && s.degrees.tp > 1 && !s.sequence_parallel {
        let why = "experts with tensor parallelism need sequence parallelism";
        adapted.change(Setting::SequenceParallel, why, "--sequence-parallel", |s| {
            s.sequence_parallel = true;
        });
    }
    if adapted.strategy.recompute == Recompute::SelectiveOp {
        let why = "Megatron recomputes named modules of a block, not every second matrix product";
        let written = "full recomputation, which saves less and recomputes more";
        adapted.change(Setting::Recompute, why, written, |s| {
            s.recompute = Recompute::Full
        });
    }
    adapt_schedule(&mut adapted);
    adapt_vocabulary(&mut adapted);
    check_shape(&adapted.shape, &adapted.strategy)?;
    Ok(adapted)
}

fn adapt_schedule(adapted: &mut Adapted) {
    let s = &adapted.strategy;
    let PipelineLayout {
        schedule,
        stages_per_rank,
    } = s.pipeline;
    let to_one = |s: &mut Strategy| {
        s.pipeline = PipelineLayout {
            schedule: ScheduleKind::OneForwardOneBackward,
            stages_per_rank: 1,
        };
    };
    match schedule {
        ScheduleKind::OneForwardOneBackward => return,
        ScheduleKind::Interleaved => {}
        ScheduleKind::LoopedBreadthFirst => {
            let written = format!("interleaved with {stages_per_rank} stages per rank");
            let why = "Megatron supports 1F1B and interleaved 1F1B only";
            adapted.change(Setting::Schedule, why, written, |s| {
                s.pipeline.schedule = ScheduleKind::Interleaved
            });
        }
        _ => {
            let why = format!("Megatron does not have the schedule {schedule}");
            adapted.change(Setting::Schedule, why, "1F1B", to_one);
            return;
        }
    }
    if let Err(FrameworkError::Unsupported { why, .. }) = check_interleaving(&adapted.strategy) {
        adapted.change(Setting::Schedule, why, "1F1B", to_one);
        return;
    }
    let pp = adapted.strategy.degrees.pp;
    let layers = adapted.shape.num_hidden_layers;
    if !is_even(layers, pp.saturating_mul(stages_per_rank)) {
        let why =
            format!("{layers} layers do not divide evenly into {pp} x {stages_per_rank} stages");
        adapted.change(Setting::Schedule, why, "1F1B", to_one);
    }
}

fn adapt_vocabulary(adapted: &mut Adapted) {
    let (size, tp) = (adapted.shape.vocab_size, adapted.strategy.degrees.tp);
    if size.is_multiple_of(tp) {
        return;
    }
    let padded = size.next_multiple_of(tp);
    let shape = DecoderConfig {
        vocab_size: padded,
        ..adapted.shape.clone()
    };
    let why =
        format!("a vocabulary of {size} does not divide evenly over {tp} tensor-parallel ranks");
    adapted.change_model(why, format!("--padded-vocab-size {padded}"), shape);
}

/// Rejects numbers of micro-batches that Megatron's interleaved schedule does not support.
pub(super) fn check_interleaving(s: &Strategy) -> Result<(), FrameworkError> {
    let (pp, m) = (s.degrees.pp, s.num_microbatches());
    if s.pipeline.stages_per_rank < 2 || pp < 2 || m.is_multiple_of(pp) {
        return Ok(());
    }
    Err(FRAMEWORK.unsupported(
        format!("{} stages per rank", s.pipeline.stages_per_rank),
        format!(
            "interleaving needs micro-batches divisible by the {pp} ranks of the pipeline, not {m}"
        ),
        format!("use 1, or {} micro-batches", m.next_multiple_of(pp)),
    ))
}

/// Whether the layers divide into equal stages, with or without embedding and loss counted as layers.
fn is_even(layers: usize, stages: usize) -> bool {
    stages > 0 && (layers.is_multiple_of(stages) || (layers + 2).is_multiple_of(stages))
}

/// Whether embedding and loss must count as layers for the stages to be equal.
pub(super) fn counts_ends(shape: &DecoderConfig, s: &Strategy) -> bool {
    let stages = s.degrees.pp.saturating_mul(s.pipeline.stages_per_rank);
    stages > 0 && !shape.num_hidden_layers.is_multiple_of(stages)
}

/// Rejects shapes that do not divide over the ranks.
pub(super) fn check_shape(shape: &DecoderConfig, s: &Strategy) -> Result<(), FrameworkError> {
    let d = &s.degrees;
    let stages = d.pp.saturating_mul(s.pipeline.stages_per_rank);
    let layers = shape.num_hidden_layers;
    if d.pp > 1 && !is_even(layers, stages) {
        let most = stages.min(layers + 2);
        let nearest = (1..=most).rev().find(|&n| is_even(layers, n)).unwrap_or(1);
        return Err(FRAMEWORK.unsupported(
            format!("{stages} stages"),
            format!(
                "neither {layers} layers nor {} with embedding and loss divide evenly",
                layers + 2
            ),
            format!("use {nearest} stages"),
        ));
    }
    for (what, number, ranks) in [
        ("attention heads", shape.num_attention_heads, d.tp),
        (
            "the feed-forward hidden size",
            shape.intermediate_size,
            d.tp,
        ),
        (
            "experts",
            shape.moe.as_ref().map_or(d.ep, |e| e.num_experts),
            d.ep,
        ),
        (
            "the sequence length (two chunks per context-parallel rank)",
            s.seq_len,
            if d.cp > 1 { 2 * d.cp } else { 1 },
        ),
        (
            "the sequence length per context-parallel rank",
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
            return Err(FRAMEWORK.unsupported(
                format!("{what}, {number}"),
                format!("it is not divisible by {ranks}"),
                format!("the nearest number that divides it is {nearest}"),
            ));
        }
    }
    let kv = shape.num_key_value_heads;
    if kv == 0 || !(kv.is_multiple_of(d.tp) || d.tp.is_multiple_of(kv)) {
        return Err(FRAMEWORK.unsupported(
            format!("{kv} KV heads"),
            format!(
                "they can neither be divided nor replicated evenly over {} tensor-parallel ranks",
                d.tp
            ),
            "use a tensor-parallel degree that divides them",
        ));
    }
    if s.seq_len > shape.max_position_embeddings {
        return Err(FRAMEWORK.unsupported(
            format!("sequence length {}", s.seq_len),
            format!(
                "the model accepts at most {}",
                shape.max_position_embeddings
            ),
            format!("use {}", shape.max_position_embeddings),
        ));
    }
    Ok(())
}

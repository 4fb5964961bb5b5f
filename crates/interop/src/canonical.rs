//! The canonical form of strategies and model shapes, in which equivalent ones are equal.
//!
//! Some settings have no effect in combination with others: a schedule without a pipeline, or a ZeRO stage if a
//! single rank holds all states. Configs do not record them, so they are reset to the value that a reader will
//! find before strategies are compared or written.

use trainyard_arch::{Activation, BIAS_UPDATE_RATE, DecoderConfig, MoeConfig};
use trainyard_schedule::ScheduleKind;

use super::{Framework, FrameworkError};
use trainyard_plan::{Degrees, Offload, PipelineLayout, Strategy, Synchronization};

/// The largest accepted world size. A larger number is a typing error, and its products could overflow.
const MOST_RANKS: usize = 1 << 24;

/// The largest accepted number of stages per rank.
const MOST_STAGES: usize = 1 << 12;

/// The largest accepted batch size and sequence length.
const MOST: usize = 1 << 40;

/// Returns the strategy with every setting that has no effect at its default.
pub(super) fn canonical(strategy: &Strategy) -> Strategy {
    let mut s = strategy.clone();
    s.pipeline = canonical_pipeline(s.pipeline, s.degrees.pp);
    s.sequence_parallel &= s.degrees.tp > 1;
    if let Synchronization::EveryStep(_) = s.synchronization {
        // Replicas that are joined in every step are those of dp_replicate.
        s.degrees.dp_replicate *= s.degrees.dp_outer;
        s.degrees.dp_outer = 1;
    }
    if s.degrees.dp_shard * s.degrees.cp == 1 && s.offload == Offload::None {
        s.zero_stage = 0;
    }
    if s.zero_stage == 0 {
        // Without sharding, dp_replicate and dp_shard mean the same. Expert parallelism uses dp_shard.
        let all = s.degrees.dp_replicate * s.degrees.dp_shard;
        let has_experts = s.degrees.ep > 1;
        s.degrees.dp_shard = if has_experts { all } else { 1 };
        s.degrees.dp_replicate = if has_experts { 1 } else { all };
    }
    s
}

fn canonical_pipeline(pipeline: PipelineLayout, pp: usize) -> PipelineLayout {
    let one = |schedule| PipelineLayout {
        schedule,
        stages_per_rank: 1,
    };
    match (pipeline.schedule, pipeline.stages_per_rank) {
        _ if pp == 1 => one(ScheduleKind::OneForwardOneBackward),
        (ScheduleKind::Interleaved, 1) => one(ScheduleKind::OneForwardOneBackward),
        (ScheduleKind::LoopedBreadthFirst, 1) => one(ScheduleKind::GPipe),
        (kind, stages) => PipelineLayout {
            schedule: kind,
            stages_per_rank: kind.num_chunks().unwrap_or(stages),
        },
    }
}

/// Returns the shape with its shared experts merged into one of their total width, and with redundant bias flags set.
pub(super) fn canonical_shape(shape: &DecoderConfig) -> DecoderConfig {
    let mut shape = shape.clone();
    shape.attention_bias |= shape.has_biases;
    shape.moe = shape.moe.map(|experts| {
        let shared = experts.shared_width();
        MoeConfig {
            n_shared_experts: usize::from(shared > 0),
            shared_expert_intermediate_size: Some(shared),
            has_shared_gate: experts.has_shared_gate && shared > 0,
            first_k_dense_replace: experts.first_k_dense_replace,
            bias_update_rate: experts.bias_update_rate.map(|_| BIAS_UPDATE_RATE),
            ..MoeConfig::plain(
                experts.num_experts,
                experts.num_experts_per_tok,
                experts.moe_intermediate_size,
            )
        }
    });
    shape
}

/// Whether two shapes are the same model, apart from the name and from what changes neither memory nor time.
pub(super) fn is_same_model(a: &DecoderConfig, b: &DecoderConfig) -> bool {
    let plain = |shape: &DecoderConfig| DecoderConfig {
        name: String::new(),
        max_position_embeddings: 0,
        rope_theta: 0.0,
        rope_scaling: None,
        norm_eps: 0.0,
        hidden_act: Activation::Silu,
        query_pre_attn_scalar: None,
        scales_embedding: false,
        has_fused_projections: false,
        resid_pdrop: 0.0,
        ..canonical_shape(shape)
    };
    plain(a) == plain(b)
}

/// Rejects degrees of zero and products above the limit. Products of accepted degrees do not overflow.
pub(super) fn check_degrees(framework: Framework, d: &Degrees) -> Result<(), FrameworkError> {
    let degrees = [d.dp_outer, d.pp, d.dp_replicate, d.dp_shard, d.cp, d.tp];
    let ranks = degrees.iter().try_fold(1usize, |product, &degree| {
        product.checked_mul(degree).filter(|&n| n <= MOST_RANKS)
    });
    if ranks.is_some_and(|ranks| ranks > 0) && (1..=MOST_RANKS).contains(&d.ep) {
        return Ok(());
    }
    Err(framework.unsupported(
        format!("degrees {degrees:?}, ep {}", d.ep),
        "every degree must be at least 1, and their product a possible number of ranks",
        "use degrees of at least 1",
    ))
}

/// Rejects strategies that no framework can run because their settings contradict each other.
pub(super) fn check(
    framework: Framework,
    shape: Option<&DecoderConfig>,
    s: &Strategy,
) -> Result<(), FrameworkError> {
    check_degrees(framework, &s.degrees)?;
    check_batch(framework, s)?;
    if let Some(Err(error)) = shape.map(DecoderConfig::check) {
        return Err(framework.unsupported("the model", error.to_string(), "change its sizes"));
    }
    if !(1..=MOST_STAGES).contains(&s.pipeline.stages_per_rank) || s.zero_stage > 3 {
        return Err(framework.unsupported(
            format!(
                "{} stages per rank, ZeRO stage {}",
                s.pipeline.stages_per_rank, s.zero_stage
            ),
            "the value is out of range",
            format!("use 1 to {MOST_STAGES} stages per rank, and ZeRO stage 0 to 3"),
        ));
    }
    let d = &s.degrees;
    let over = d.dp_shard * d.cp * d.tp;
    let experts = format!("expert parallelism of degree {}", d.ep);
    if !over.is_multiple_of(d.ep) {
        return Err(framework.unsupported(
            experts,
            "the degree must divide dp_shard x cp x tp",
            format!("use a divisor of {over}"),
        ));
    }
    if d.ep > 1 && shape.is_some_and(|shape| shape.moe.is_none()) {
        return Err(framework.unsupported(experts, "the model has no experts", "use 1"));
    }
    Ok(())
}

/// Rejects batch sizes that do not divide over the ranks. Expects checked degrees.
fn check_batch(framework: Framework, s: &Strategy) -> Result<(), FrameworkError> {
    let (global, micro) = (s.global_batch, s.micro_batch);
    let sizes = [global, micro, s.seq_len];
    if sizes.iter().any(|size| !(1..=MOST).contains(size)) {
        return Err(framework.unsupported(
            format!(
                "global batch {global}, micro-batch {micro}, sequence length {}",
                s.seq_len
            ),
            "a size is out of range",
            format!("use sizes from 1 to {MOST}"),
        ));
    }
    let ranks = s.degrees.data_parallel();
    let at_once = ranks.saturating_mul(micro);
    if global.is_multiple_of(at_once) {
        return Ok(());
    }
    let nearest = at_once.saturating_mul((global / at_once).max(1));
    Err(framework.unsupported(
        format!("a global batch of {global}"),
        format!("it is not a multiple of {at_once}: {ranks} data-parallel ranks with micro-batches of {micro}"),
        format!("the nearest global batch is {nearest}"),
    ))
}

//! Trainyard's TOML.

mod read;
mod synchronization;

use std::fmt::{Display, Write as _};

use trainyard_arch::{DecoderConfig, FeedForward, Flavor, MoeConfig, Norm, Positions};
use trainyard_config::{Config, Dtype};

use super::adapt::Adapted;
use super::arguments::torchrun;
use super::{EmittedConfig, Framework, FrameworkError, Setting, is_same_model};
pub(super) use read::read;
use trainyard_plan::{Offload, PrecisionByStage, Recompute, Strategy, Synchronization};

const FRAMEWORK: Framework = Framework::Trainyard;

/// The precisions with `training.dtype`, of weights and states, and `training.mixed_precision_param`, of compute.
const TYPES: [(PrecisionByStage, Dtype, Dtype); 4] = [
    (
        PrecisionByStage::trainyard(2, 4),
        Dtype::Float32,
        Dtype::Bfloat16,
    ),
    (
        PrecisionByStage::trainyard(4, 4),
        Dtype::Float32,
        Dtype::Float32,
    ),
    (
        PrecisionByStage::trainyard(2, 2),
        Dtype::Bfloat16,
        Dtype::Bfloat16,
    ),
    (
        PrecisionByStage::trainyard(8, 8),
        Dtype::Float64,
        Dtype::Float64,
    ),
];

pub(super) fn write(
    shape: &DecoderConfig,
    strategy: &Strategy,
) -> Result<EmittedConfig, FrameworkError> {
    if let Synchronization::ParameterServer { .. } = strategy.synchronization {
        return Err(FRAMEWORK.unsupported(
            "a parameter server",
            "the planner estimates it, but does not write its config",
            "use local updates, or average gradients in every step",
        ));
    }
    let adapted = adapt(shape, strategy);
    let text = text(&adapted);
    Config::parse(&text, &[])?;
    Ok(EmittedConfig {
        text,
        deviations: adapted.deviations,
    })
}

fn adapt(shape: &DecoderConfig, strategy: &Strategy) -> Adapted {
    let mut adapted = Adapted::new(shape, strategy);
    adapt_model(&mut adapted);
    adapt_experts(&mut adapted);
    let s = &adapted.strategy;
    if s.degrees.pp > 1 && s.degrees.dp_shard > 1 && adapted.shape.tie_word_embeddings {
        let why = "Trainyard does not shard a tied embedding at both ends of a pipeline";
        adapted.change(Setting::ZeroStage, why, "no sharding", |s| {
            s.zero_stage = 0;
            s.offload = Offload::None;
        });
    }
    if adapted.strategy.offload != Offload::None && adapted.strategy.zero_stage != 3 {
        let why = "offloading needs the parameter gathering of stage 3";
        adapted.change(Setting::ZeroStage, why, "zero_stage = 3", |s| {
            s.zero_stage = 3
        });
    }
    let s = &adapted.strategy;
    if s.zero_stage > 0 && s.degrees.dp_shard == 1 && s.offload == Offload::None {
        let why = "Trainyard shards states over cp only if data_parallel_shard_degree > 1";
        adapted.change(Setting::ZeroStage, why, "no sharding", |s| s.zero_stage = 0);
    }
    if adapted.strategy.recompute == Recompute::SelectiveOp {
        let why = "Trainyard's selective mode recomputes attention and saves all matrix products";
        let written = "full recomputation, which saves less and recomputes more";
        adapted.change(Setting::Recompute, why, written, |s| {
            s.recompute = Recompute::Full
        });
    }
    let stage = adapted.strategy.zero_stage;
    let offered = TYPES.map(|(precision, ..)| precision.at(stage));
    let why = match stage {
        0 => "weights have no second copy without sharding",
        _ => "with sharding, layers use weights and gradients of the compute type",
    };
    adapted.choose_precision(&offered, why);
    adapted
}

/// Changes the settings that Trainyard's experts do not support.
fn adapt_experts(adapted: &mut Adapted) {
    if adapted.shape.moe.is_none() {
        return;
    }
    if adapted.strategy.degrees.tp > 1 && !adapted.strategy.sequence_parallel {
        let why = "with experts, each tensor-parallel rank routes its own tokens";
        let written = "enable_sequence_parallel = true";
        adapted.change(Setting::SequenceParallel, why, written, |s| {
            s.sequence_parallel = true
        });
    }
}

/// The nearest experts that Trainyard has: shared experts are as wide as routed ones, and have no gate.
fn our_experts(experts: &MoeConfig) -> MoeConfig {
    let (width, shared) = (experts.moe_intermediate_size, experts.shared_width());
    MoeConfig {
        n_shared_experts: shared.div_ceil(width.max(1)),
        shared_expert_intermediate_size: None,
        has_shared_gate: false,
        ..experts.clone()
    }
}

fn adapt_model(adapted: &mut Adapted) {
    adapted.leave_out_family_details();
    let shape = &adapted.shape;
    if shape.is_gpt2() {
        return;
    }
    let mut missing = Vec::new();
    let experts = shape.moe.as_ref();
    let features = [
        (
            experts.is_some_and(|e| e.has_shared_gate && e.shared_width() > 0),
            "gate of the shared experts",
        ),
        (
            experts.is_some_and(|e| e.shared_width() != our_experts(e).shared_width()),
            "shared experts of a different width than the routed ones",
        ),
        (shape.latent.is_some(), "latent attention"),
        (
            shape.feed_forward == FeedForward::Plain,
            "feed-forward without a gate",
        ),
        (shape.norm == Norm::Layer, "LayerNorm"),
        (
            shape.positions == Positions::Learned,
            "learned position embeddings",
        ),
        (shape.has_biases, "biases in every linear layer"),
    ];
    missing.extend(
        features
            .iter()
            .filter(|(has, _)| *has)
            .map(|(_, name)| *name),
    );
    if missing.is_empty() {
        return;
    }
    let nearest = DecoderConfig {
        moe: experts.map(our_experts),
        latent: None,
        feed_forward: FeedForward::Gated,
        norm: Norm::RootMeanSquare,
        positions: Positions::Rotary,
        has_biases: false,
        ..shape.clone()
    };
    let why = format!(
        "[model] has no keys for: {}; model.hf_assets_path has them",
        missing.join(", ")
    );
    adapted.change_model(why, "a Llama of the same sizes", nearest);
}

fn text(adapted: &Adapted) -> String {
    let (shape, s) = (&adapted.shape, &adapted.strategy);
    let world = s.degrees.world_size();
    let launch = torchrun(world).replacen("torchrun", "trainyard run", 1);
    let mut out = format!("# {launch} -- trainyard train this.toml\n\n");
    let _ = writeln!(
        out,
        "[job]\ndescription = {}\n",
        quoted(&format!("{} on {world} ranks", shape.name))
    );
    write_model(&mut out, shape);
    write_training(&mut out, s);
    write_parallelism(&mut out, shape, s);
    let mode = match s.recompute {
        Recompute::None => "none",
        Recompute::Selective => "selective",
        Recompute::SelectiveOp | Recompute::Full => "full",
    };
    let _ = writeln!(out, "\n[activation_checkpoint]\nmode = \"{mode}\"");
    synchronization::write_local_updates(&mut out, &s.synchronization);
    out
}

fn write_model(out: &mut String, shape: &DecoderConfig) {
    if shape.is_gpt2() {
        write_gpt2(out, shape)
    } else {
        write_llama(out, shape)
    }
    let _ = writeln!(
        out,
        "max_position_embeddings = {}",
        shape.max_position_embeddings
    );
    if let Some(experts) = &shape.moe {
        write_experts(out, &our_experts(experts));
    }
}

/// Writes the `[model.moe]` table, which must follow all keys of `[model]`.
fn write_experts(out: &mut String, experts: &MoeConfig) {
    out.push_str("\n[model.moe]\n");
    write_keys(
        out,
        &[
            ("num_experts", experts.num_experts),
            ("num_experts_per_tok", experts.num_experts_per_tok),
            ("moe_intermediate_size", experts.moe_intermediate_size),
            ("n_shared_experts", experts.n_shared_experts),
            ("first_k_dense_replace", experts.first_k_dense_replace),
        ],
    );
    if let Some(rate) = experts.bias_update_rate {
        let _ = writeln!(out, "bias_update_rate = {rate}");
    }
}

fn write_gpt2(out: &mut String, shape: &DecoderConfig) {
    let name = if shape.is_causal { "gpt2" } else { "encoder" };
    let _ = writeln!(out, "[model]\nname = \"{name}\"");
    write_keys(
        out,
        &[
            ("vocab_size", shape.vocab_size),
            ("hidden_size", shape.hidden_size),
            ("intermediate_size", shape.intermediate_size),
            ("num_hidden_layers", shape.num_hidden_layers),
            ("num_attention_heads", shape.num_attention_heads),
        ],
    );
    let _ = writeln!(out, "tie_word_embeddings = {}", shape.tie_word_embeddings);
}

fn write_llama(out: &mut String, shape: &DecoderConfig) {
    out.push_str("[model]\nname = \"llama\"\n");
    let flavor = Flavor::ALL
        .into_iter()
        .find(|flavor| is_same_model(&DecoderConfig::from(*flavor), shape));
    match flavor {
        Some(flavor) => {
            let _ = writeln!(out, "flavor = \"{}\"", flavor.name());
        }
        None => {
            write_keys(
                out,
                &[
                    ("vocab_size", shape.vocab_size),
                    ("hidden_size", shape.hidden_size),
                    ("intermediate_size", shape.intermediate_size),
                    ("num_hidden_layers", shape.num_hidden_layers),
                    ("num_attention_heads", shape.num_attention_heads),
                    ("num_key_value_heads", shape.num_key_value_heads),
                    ("head_dim", shape.head_dim),
                ],
            );
            write_keys(
                out,
                &[
                    ("tie_word_embeddings", shape.tie_word_embeddings),
                    ("attention_bias", shape.attention_bias),
                    ("qk_norm", shape.qk_norm.is_some()),
                ],
            );
        }
    }
}

fn write_training(out: &mut String, s: &Strategy) {
    let types = TYPES
        .iter()
        .find(|(precision, ..)| precision.at(s.zero_stage) == s.precision);
    let (held, computed) = types.map_or((Dtype::Float32, Dtype::Bfloat16), |t| (t.1, t.2));
    let _ = write!(
        out,
        "\n[training]\nlocal_batch_size = {}\nglobal_batch_size = {}\nseq_len = {}\ndtype = \"{}\"\n",
        s.micro_batch,
        s.global_batch,
        s.seq_len,
        held.name()
    );
    if held != computed {
        let _ = writeln!(out, "mixed_precision_param = \"{}\"", computed.name());
    }
}

fn write_parallelism(out: &mut String, shape: &DecoderConfig, s: &Strategy) {
    let d = &s.degrees;
    out.push_str("\n[parallelism]\n");
    if d.dp_outer > 1 {
        let _ = writeln!(out, "data_parallel_outer_degree = {}", d.dp_outer);
    }
    write_keys(
        out,
        &[
            ("data_parallel_replicate_degree", d.dp_replicate),
            ("data_parallel_shard_degree", d.dp_shard),
            ("tensor_parallel_degree", d.tp),
            ("context_parallel_degree", d.cp),
            ("pipeline_parallel_degree", d.pp),
        ],
    );
    if d.ep > 1 {
        let _ = writeln!(out, "expert_parallel_degree = {}", d.ep);
    }
    if s.zero_stage > 0 || d.dp_shard > 1 {
        let _ = writeln!(out, "zero_stage = {}", s.zero_stage);
    }
    synchronization::write_gradient_compression(out, &s.synchronization);
    let _ = writeln!(out, "enable_sequence_parallel = {}", s.sequence_parallel);
    if s.sequence_parallel && d.tp > 1 {
        // The estimate assumes that saved activations are sharded over the tensor-parallel ranks.
        out.push_str("sequence_parallel_regather = true\n");
    }
    if d.pp > 1 {
        let schedule = s.pipeline.schedule;
        let _ = writeln!(out, "pipeline_parallel_schedule = \"{schedule}\"");
        if s.zero_stage > 1 {
            // The estimate assumes a reduce-scatter of gradients after every micro-batch.
            out.push_str("pipeline_parallel_reduce = \"each\"\n");
        }
        if schedule.num_chunks().is_none() {
            let stages = s.pipeline.stages_per_rank;
            let _ = writeln!(out, "pipeline_parallel_stages_per_rank = {stages}");
        }
        let points: Vec<String> = (1..s.num_stages())
            .map(|stage| s.blocks_of(shape.num_hidden_layers, stage).start)
            .map(|block| format!("layers.{block}"))
            .collect();
        // With fewer blocks than stages there are no such split points; the job chooses its own.
        if shape.num_hidden_layers >= s.num_stages() {
            let points = points.join(",");
            let _ = writeln!(out, "pipeline_parallel_split_points = \"{points}\"");
        }
    }
    out.push_str(match s.offload {
        Offload::None => "",
        Offload::Cpu => "offload = \"cpu\"\n",
        Offload::Nvme => "offload = \"nvme\"\noffload_folder = \"./outputs/offload\"\n",
    });
}

fn write_keys(out: &mut String, keys: &[(&str, impl Display)]) {
    for (key, value) in keys {
        let _ = writeln!(out, "{key} = {value}");
    }
}

fn quoted(text: &str) -> String {
    toml::Value::String(text.to_owned()).to_string()
}

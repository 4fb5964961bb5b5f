//! Our own TOML.

mod read;

use std::fmt::{Display, Write as _};

use trainyard_config::{Config, Dtype, Flavor, LlamaConfig};

use super::arguments::torchrun;
use super::fit::Fit;
use super::{Choice, Framework, FrameworkError, Written, is_same_model};
use crate::stages::blocks_before;
use crate::{Experts, FeedForward, Held, Norm, Offload, Positions, Recompute, Shape, Strategy};
pub(super) use read::read;

const FRAMEWORK: Framework = Framework::Trainyard;

/// How far a step moves a router's bias, as DeepSeek-V3 has it; a plan knows only that there is one.
const BIAS_UPDATE_RATE: f64 = 0.001;

/// Weights and states are held in one type; layers compute in it, or in a narrower one.
const TYPES: [(Held, Dtype, Dtype); 4] = [
    (Held::ours(2, 4), Dtype::Float32, Dtype::Bfloat16),
    (Held::ours(4, 4), Dtype::Float32, Dtype::Float32),
    (Held::ours(2, 2), Dtype::Bfloat16, Dtype::Bfloat16),
    (Held::ours(8, 8), Dtype::Float64, Dtype::Float64),
];

/// The flavors with a name, in the order in which they are tried.
const FLAVORS: [(Flavor, &str); 5] = [
    (Flavor::Tiny, "tiny"),
    (Flavor::Small, "small"),
    (Flavor::Llama3_8b, "llama3-8b"),
    (Flavor::Llama3_70b, "llama3-70b"),
    (Flavor::Llama3_405b, "llama3-405b"),
];

pub(super) fn write(shape: &Shape, strategy: &Strategy) -> Result<Written, FrameworkError> {
    let fit = fit(shape, strategy);
    let text = text(&fit);
    Config::parse(&text, &[])?;
    Ok(Written {
        text,
        losses: fit.losses,
    })
}

fn fit(shape: &Shape, strategy: &Strategy) -> Fit {
    let mut fit = Fit::new(shape, strategy);
    fit_model(&mut fit);
    fit_experts(&mut fit);
    let s = &fit.strategy;
    if s.degrees.pp > 1 && s.degrees.dp_shard > 1 && fit.shape.tie_word_embeddings {
        let why = "a head that is the embedding, at both ends of a pipeline, is not sharded";
        fit.change(Choice::ZeroStage, why, "nothing sharded", |s| {
            s.zero_stage = 0;
            s.offload = Offload::None;
        });
    }
    if fit.strategy.offload != Offload::None && fit.strategy.zero_stage != 3 {
        let why = "offloading needs parameters that are gathered when needed";
        fit.change(Choice::ZeroStage, why, "zero_stage = 3", |s| {
            s.zero_stage = 3
        });
    }
    let s = &fit.strategy;
    if s.zero_stage > 0 && s.degrees.dp_shard == 1 && s.offload == Offload::None {
        let why = "states are sharded over cp only together with data_parallel_shard_degree > 1";
        fit.change(Choice::ZeroStage, why, "nothing sharded", |s| {
            s.zero_stage = 0
        });
    }
    if fit.strategy.recompute == Recompute::Products {
        let why = "our selective recomputes attention, and keeps all products";
        let written = "full recomputation, which keeps less and computes more again";
        fit.change(Choice::Recompute, why, written, |s| {
            s.recompute = Recompute::Full
        });
    }
    let stage = fit.strategy.zero_stage;
    let offered = TYPES.map(|(held, ..)| held.at(stage));
    let why = match stage {
        0 => "weights have no second copy where nothing is sharded",
        _ => "beside shards layers find weights and leave gradients in their own type",
    };
    fit.choose_precision(&offered, why);
    fit
}

/// What our experts cannot be beside.
fn fit_experts(fit: &mut Fit) {
    if fit.shape.experts.is_none() {
        return;
    }
    if fit.strategy.offload != Offload::None {
        let why = "experts are not offloaded by this version";
        fit.change(Choice::Offload, why, "states with the layers", |s| {
            s.offload = Offload::None
        });
    }
    if fit.strategy.degrees.tp > 1 && !fit.strategy.sequence_parallel {
        let why = "ranks that share matrices route different positions";
        let written = "enable_sequence_parallel = true";
        fit.change(Choice::SequenceParallel, why, written, |s| {
            s.sequence_parallel = true
        });
    }
}

/// The same experts as far as ours can be so: shared ones are as wide as the others, and no gate weighs them.
fn our_experts(experts: &Experts) -> Experts {
    let (width, shared) = (experts.moe_intermediate_size, shared_width(experts));
    Experts {
        num_shared_experts: shared.div_ceil(width.max(1)),
        shared_intermediate_size: if shared > 0 { width } else { 0 },
        has_shared_gate: false,
        ..experts.clone()
    }
}

/// Width of all shared experts together.
fn shared_width(experts: &Experts) -> usize {
    experts.num_shared_experts * experts.shared_intermediate_size
}

/// Whether a shape is a GPT-2: all of its parts, and none of a Llama's.
fn is_gpt2(shape: &Shape) -> bool {
    let plain = Shape::gpt(
        shape.num_hidden_layers,
        shape.hidden_size,
        shape.num_attention_heads,
        shape.vocab_size,
        shape.max_position_embeddings,
    );
    let plain = Shape {
        intermediate_size: shape.intermediate_size,
        tie_word_embeddings: shape.tie_word_embeddings,
        ..plain
    };
    let is_whole = shape.hidden_size == shape.num_attention_heads * shape.head_dim;
    is_whole && is_same_model(shape, &plain)
}

fn fit_model(fit: &mut Fit) {
    let shape = &fit.shape;
    if is_gpt2(shape) {
        return;
    }
    let mut missing = Vec::new();
    let experts = shape.experts.as_ref();
    let parts = [
        (
            experts.is_some_and(|e| e.has_shared_gate && shared_width(e) > 0),
            "gate of shared experts",
        ),
        (
            experts.is_some_and(|e| shared_width(e) != shared_width(&our_experts(e))),
            "shared experts of another width than the others",
        ),
        (shape.latent.is_some(), "latent attention"),
        (
            shape.feed_forward == FeedForward::Plain,
            "plain feed-forward parts",
        ),
        (shape.norm == Norm::Layer, "layer norms"),
        (shape.positions == Positions::Learnt, "a table of positions"),
        (shape.has_biases, "biases of all matrices"),
    ];
    missing.extend(parts.iter().filter(|(has, _)| *has).map(|(_, name)| *name));
    if missing.is_empty() {
        return;
    }
    let nearest = Shape {
        experts: experts.map(our_experts),
        latent: None,
        feed_forward: FeedForward::Gated,
        norm: Norm::RootMeanSquare,
        positions: Positions::Rotary,
        has_biases: false,
        ..shape.clone()
    };
    let why = format!(
        "models of this version are Llamas or GPT-2s, and a Llama has no {}",
        missing.join(", ")
    );
    fit.change_model(why, "a Llama of the same widths", nearest);
}

fn text(fit: &Fit) -> String {
    let (shape, s) = (&fit.shape, &fit.strategy);
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
        Recompute::Products | Recompute::Full => "full",
    };
    let _ = writeln!(out, "\n[activation_checkpoint]\nmode = \"{mode}\"");
    out
}

fn write_model(out: &mut String, shape: &Shape) {
    match is_gpt2(shape) {
        true => write_gpt2(out, shape),
        false => write_llama(out, shape),
    }
    let _ = writeln!(
        out,
        "max_position_embeddings = {}",
        shape.max_position_embeddings
    );
    if let Some(experts) = &shape.experts {
        write_experts(out, &our_experts(experts));
    }
}

/// A table of its own, so after all of the model's keys.
fn write_experts(out: &mut String, experts: &Experts) {
    out.push_str("\n[model.moe]\n");
    write_keys(
        out,
        &[
            ("num_experts", experts.num_experts),
            ("num_experts_per_tok", experts.num_experts_per_tok),
            ("moe_intermediate_size", experts.moe_intermediate_size),
            ("n_shared_experts", experts.num_shared_experts),
            ("first_k_dense_replace", experts.num_dense_layers),
        ],
    );
    if experts.has_router_bias {
        let _ = writeln!(out, "bias_update_rate = {BIAS_UPDATE_RATE}");
    }
}

fn write_gpt2(out: &mut String, shape: &Shape) {
    out.push_str("[model]\nname = \"gpt2\"\n");
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

fn write_llama(out: &mut String, shape: &Shape) {
    out.push_str("[model]\nname = \"llama\"\n");
    let flavor = FLAVORS
        .iter()
        .find(|(flavor, _)| is_same_model(&Shape::from(&LlamaConfig::of(*flavor)), shape));
    match flavor {
        Some((_, name)) => {
            let _ = writeln!(out, "flavor = \"{name}\"");
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
                    ("qk_norm", shape.qk_norm),
                ],
            );
        }
    }
}

fn write_training(out: &mut String, s: &Strategy) {
    let types = TYPES
        .iter()
        .find(|(held, ..)| held.at(s.zero_stage) == s.precision);
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

fn write_parallelism(out: &mut String, shape: &Shape, s: &Strategy) {
    let d = &s.degrees;
    out.push_str("\n[parallelism]\n");
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
    let _ = writeln!(out, "enable_sequence_parallel = {}", s.sequence_parallel);
    if s.sequence_parallel && d.tp > 1 {
        // What blocks keep is counted as divided by the ranks that share them.
        out.push_str("sequence_parallel_regather = true\n");
    }
    if d.pp > 1 {
        let schedule = s.layers.schedule;
        let _ = writeln!(out, "pipeline_parallel_schedule = \"{schedule}\"");
        if s.zero_stage > 1 {
            // Their gradients are counted as sharded with every pass.
            out.push_str("pipeline_parallel_reduce = \"each\"\n");
        }
        if schedule.num_chunks().is_none() {
            let stages = s.layers.stages_per_rank;
            let _ = writeln!(out, "pipeline_parallel_stages_per_rank = {stages}");
        }
        let points: Vec<String> = (1..s.num_stages())
            .map(|stage| blocks_before(shape.num_hidden_layers, s.num_stages(), stage))
            .map(|block| format!("layers.{block}"))
            .collect();
        // Fewer blocks than stages cannot be cut so; the job then finds its own way.
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

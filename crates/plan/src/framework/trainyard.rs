//! Our own TOML.

use std::fmt::Write as _;

use trainyard_config::{
    ActivationCheckpointMode, Config, Dtype, Flavor, LlamaConfig, ModelSpec, OptimizerName,
    SelectiveOption,
};
use trainyard_mesh::Axis;

use super::arguments::torchrun;
use super::fit::Fit;
use super::{Choice, Framework, FrameworkError, Read, Told, Written, is_same_model};
use crate::stages::blocks_before;
use crate::{
    Degrees, FeedForward, Layers, Norm, Offload, Positions, Precision, Recompute, Shape, Strategy,
};

const FRAMEWORK: Framework = Framework::Trainyard;

/// Weights and states are held in one type; layers compute in it, or in a narrower one.
const PRECISIONS: [(Precision, Dtype, Dtype); 4] = [
    (precision(2, 4), Dtype::Float32, Dtype::Bfloat16),
    (precision(4, 4), Dtype::Float32, Dtype::Float32),
    (precision(2, 2), Dtype::Bfloat16, Dtype::Bfloat16),
    (precision(8, 8), Dtype::Float64, Dtype::Float64),
];

const fn precision(compute: usize, held: usize) -> Precision {
    Precision {
        compute,
        parameter: held,
        gradient: held,
        optimizer: 2 * held,
    }
}

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
    if fit.strategy.degrees.ep > 1 {
        fit.change(
            Choice::ExpertParallel,
            "this version has no experts",
            "expert_parallel_degree = 1",
            |s| s.degrees.ep = 1,
        );
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
    let offered = PRECISIONS.map(|(precision, ..)| precision);
    fit.choose_precision(
        &offered,
        "weights have no second copy beside the optimiser's",
    );
    fit
}

fn fit_model(fit: &mut Fit) {
    let shape = &fit.shape;
    let mut missing = Vec::new();
    let parts = [
        (shape.experts.is_some(), "experts"),
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
        experts: None,
        latent: None,
        feed_forward: FeedForward::Gated,
        norm: Norm::RootMeanSquare,
        positions: Positions::Rotary,
        has_biases: false,
        ..shape.clone()
    };
    let why = format!("models of this version have no {}", missing.join(", "));
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
        Recompute::Full => "full",
    };
    let _ = writeln!(out, "\n[activation_checkpoint]\nmode = \"{mode}\"");
    out
}

fn write_model(out: &mut String, shape: &Shape) {
    out.push_str("[model]\nname = \"llama\"\n");
    let flavor = FLAVORS
        .iter()
        .find(|(flavor, _)| is_same_model(&Shape::from(&LlamaConfig::of(*flavor)), shape));
    match flavor {
        Some((_, name)) => {
            let _ = writeln!(out, "flavor = \"{name}\"");
        }
        None => {
            for (key, value) in [
                ("vocab_size", shape.vocab_size),
                ("hidden_size", shape.hidden_size),
                ("intermediate_size", shape.intermediate_size),
                ("num_hidden_layers", shape.num_hidden_layers),
                ("num_attention_heads", shape.num_attention_heads),
                ("num_key_value_heads", shape.num_key_value_heads),
                ("head_dim", shape.head_dim),
            ] {
                let _ = writeln!(out, "{key} = {value}");
            }
            for (key, value) in [
                ("tie_word_embeddings", shape.tie_word_embeddings),
                ("attention_bias", shape.attention_bias),
                ("qk_norm", shape.qk_norm),
            ] {
                let _ = writeln!(out, "{key} = {value}");
            }
        }
    }
    let _ = writeln!(
        out,
        "max_position_embeddings = {}",
        shape.max_position_embeddings
    );
}

fn write_training(out: &mut String, s: &Strategy) {
    let types = PRECISIONS
        .iter()
        .find(|(precision, ..)| *precision == s.precision);
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
    for (key, value) in [
        ("data_parallel_replicate_degree", d.dp_replicate),
        ("data_parallel_shard_degree", d.dp_shard),
        ("tensor_parallel_degree", d.tp),
        ("context_parallel_degree", d.cp),
        ("pipeline_parallel_degree", d.pp),
    ] {
        let _ = writeln!(out, "{key} = {value}");
    }
    if s.zero_stage > 0 {
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

fn quoted(text: &str) -> String {
    toml::Value::String(text.to_owned()).to_string()
}

pub(super) fn read(text: &str, told: &Told) -> Result<Read, FrameworkError> {
    let config = Config::parse(text, &[])?;
    let ModelSpec::Llama(llama) = config.model.resolve()? else {
        let why = "strategies are about decoders";
        return Err(FRAMEWORK.refusal("model.name = \"cnn\"", why, "use model.name = \"llama\""));
    };
    let (degrees, world) = read_degrees(&config, told)?;
    let batching = config.batching(degrees.data_parallel())?;
    let p = &config.parallelism;
    if let Some(path) = &p.pipeline_parallel_schedule_csv {
        return Err(FRAMEWORK.refusal(
            format!("pipeline_parallel_schedule_csv = {path:?}"),
            "a plan knows schedules by name",
            "use pipeline_parallel_schedule",
        ));
    }
    let offload = match p.offload {
        trainyard_config::Offload::None => Offload::None,
        trainyard_config::Offload::Cpu => Offload::Cpu,
        trainyard_config::Offload::Nvme => Offload::Nvme,
    };
    let is_sharded = degrees.dp_shard > 1 || offload != Offload::None;
    let schedule = p.schedule_kind()?;
    let strategy = Strategy {
        degrees,
        zero_stage: if is_sharded { p.zero_stage } else { 0 },
        sequence_parallel: p.enable_sequence_parallel,
        layers: Layers {
            schedule,
            stages_per_rank: p.pipeline_parallel_stages_per_rank,
        },
        global_batch: batching.global,
        micro_batch: batching.local,
        seq_len: config.training.seq_len,
        recompute: read_recompute(&config)?,
        offload,
        precision: read_precision(&config)?,
    };
    Ok(Read {
        shape: Some(Shape::from(&llama)),
        strategy,
        world,
    })
}

/// The sizes of the axes, and how many ranks the text itself says there are.
fn read_degrees(config: &Config, told: &Told) -> Result<(Degrees, Option<usize>), FrameworkError> {
    let p = &config.parallelism;
    let degrees = [
        p.data_parallel_replicate_degree,
        p.data_parallel_shard_degree,
        p.pipeline_parallel_degree,
        p.context_parallel_degree,
        p.tensor_parallel_degree,
    ];
    let fixed = degrees.iter().try_fold(1usize, |product, &degree| {
        product.checked_mul(usize::try_from(degree).ok()?)
    });
    let Some(world) = told.world.or(fixed) else {
        return Err(FRAMEWORK.untold(
            "how many ranks there are",
            "give data_parallel_replicate_degree a number instead of -1, or tell the ranks beside it",
        ));
    };
    let mesh = config.mesh(world)?;
    let degrees = Degrees {
        pp: mesh.size(Axis::Pp),
        dp_replicate: mesh.size(Axis::DpReplicate),
        dp_shard: mesh.size(Axis::DpShard),
        cp: mesh.size(Axis::Cp),
        tp: mesh.size(Axis::Tp),
        ep: 1,
    };
    Ok((degrees, fixed))
}

fn read_recompute(config: &Config) -> Result<Recompute, FrameworkError> {
    let section = &config.activation_checkpoint;
    match (section.mode, section.selective()?) {
        (ActivationCheckpointMode::None, _) => Ok(Recompute::None),
        (ActivationCheckpointMode::Full, _) => Ok(Recompute::Full),
        (ActivationCheckpointMode::Selective, SelectiveOption::Attention) => {
            Ok(Recompute::Selective)
        }
        (ActivationCheckpointMode::Selective, SelectiveOption::Every(1)) => Ok(Recompute::Full),
        (ActivationCheckpointMode::Selective, SelectiveOption::Every(k)) => Err(FRAMEWORK.refusal(
            format!("selective_ac_option = \"{k}\""),
            "a plan recomputes the same in every block",
            "use \"attention\", or mode = \"full\"",
        )),
        (ActivationCheckpointMode::MemoryBudget, _) => Err(FRAMEWORK.refusal(
            "activation_checkpoint.mode = \"memory_budget\"",
            "what it recomputes is found by a dry run",
            "use \"none\", \"selective\" or \"full\"",
        )),
    }
}

fn read_precision(config: &Config) -> Result<Precision, FrameworkError> {
    if matches!(
        config.optimizer.name,
        OptimizerName::Sgd | OptimizerName::Lars
    ) {
        return Err(FRAMEWORK.refusal(
            format!("optimizer.name = {:?}", config.optimizer.name),
            "a plan counts two states of a parameter, and this has one",
            "use \"AdamW\"",
        ));
    }
    let (held, computed) = (config.training.dtype, config.training.compute_dtype());
    let known = PRECISIONS
        .iter()
        .find(|(_, dtype, compute)| (*dtype, *compute) == (held, computed));
    known.map(|(precision, ..)| *precision).ok_or_else(|| {
        FRAMEWORK.refusal(
            format!("mixed_precision_param = \"{}\"", computed.name()),
            "a plan knows types by their bytes, and losses in float16 are scaled",
            "use \"bfloat16\"",
        )
    })
}

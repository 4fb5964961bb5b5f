//! Writes an adapted strategy as torchtitan's settings, in a file or on a command line.

use std::fmt::Write as _;

use super::super::adapt::Adapted;
use super::super::arguments::torchrun;
use super::PRECISIONS;
use super::adapt::layers_per_stage;
use super::flavors::Flavor;
use trainyard_plan::{Offload, Recompute, Strategy};

/// A setting's value.
enum Value {
    Number(usize),
    Text(&'static str),
    Flag(bool),
}

/// Writes the TOML file.
pub(super) fn toml(adapted: &Adapted, flavor: &Flavor) -> String {
    let s = &adapted.strategy;
    let launch = torchrun(s.degrees.world_size());
    let mut out = format!(
        "# {launch} -m torchtitan.train --job.config_file this.toml\n\n\
         [model]\nname = \"{}\"\nflavor = \"{}\"\n",
        flavor.module, flavor.name
    );
    let mut last = "";
    let mut settings = settings(adapted);
    if s.degrees.ep > 1 {
        // Tensor parallelism does not split experts, which is the only mode of 0.3.0.
        let key = "parallelism.expert_tensor_parallel_degree";
        settings.push((key, Value::Number(1)));
    }
    settings.push(("activation_checkpoint.mode", Value::Text(recompute(s))));
    if s.recompute == Recompute::SelectiveOp {
        let key = "activation_checkpoint.selective_ac_option";
        settings.push((key, Value::Text("op")));
    }
    for (path, value) in &settings {
        let (section, key) = path.split_once('.').unwrap_or(("", path));
        if section != last {
            let _ = writeln!(out, "\n[{section}]");
            last = section;
        }
        let _ = match value {
            Value::Number(n) => writeln!(out, "{key} = {n}"),
            Value::Text(text) => writeln!(out, "{key} = \"{text}\""),
            Value::Flag(flag) => writeln!(out, "{key} = {flag}"),
        };
    }
    out
}

/// Writes the command line.
pub(super) fn command_line(adapted: &Adapted, flavor: &Flavor) -> String {
    let s = &adapted.strategy;
    let config = flavor.config.map_or("", |config| config.name);
    let mut out = format!(
        "{} -m torchtitan.train --module {} --config {config}",
        torchrun(s.degrees.world_size()),
        flavor.module
    );
    let mut settings = settings(adapted);
    let is_enabled = s.sequence_parallel || s.degrees.tp == 1;
    settings.push((
        "parallelism.enable_sequence_parallel",
        Value::Flag(is_enabled),
    ));
    if s.degrees.pp * s.degrees.ep > 1 {
        // CUDA graphs are on by default, and support neither pipelines nor the registered token dispatcher.
        settings.push(("training.disable_cuda_graphs", Value::Flag(true)));
    }
    for (path, value) in &settings {
        let _ = match value {
            Value::Number(n) => write!(out, " \\\n  --{path} {n}"),
            Value::Text(text) => write!(out, " \\\n  --{path} {text}"),
            Value::Flag(true) => write!(out, " \\\n  --{path}"),
            Value::Flag(false) => {
                let (section, key) = path.split_once('.').unwrap_or(("", path));
                write!(out, " \\\n  --{section}.no-{key}")
            }
        };
    }
    let _ = writeln!(out, " \\\n  activation_checkpoint:{}", recompute(s));
    out
}

/// The settings of both versions, section by section.
fn settings(adapted: &Adapted) -> Vec<(&'static str, Value)> {
    use Value::{Flag, Number, Text};
    let s = &adapted.strategy;
    let d = &s.degrees;
    let types = PRECISIONS
        .iter()
        .find(|(precision, ..)| *precision == s.precision);
    let (held, computed) = types.map_or(("float32", "bfloat16"), |t| (t.1, t.2));
    // A pipeline splits the local batch into micro-batches; without one, gradients accumulate over local batches.
    let local = match d.pp {
        1 => s.micro_batch,
        _ => s.micro_batch * s.num_microbatches(),
    };
    let mut all = vec![
        ("training.local_batch_size", Number(local)),
        ("training.global_batch_size", Number(s.global_batch)),
        ("training.seq_len", Number(s.seq_len)),
        ("training.dtype", Text(held)),
        ("training.mixed_precision_param", Text(computed)),
        (
            "training.enable_cpu_offload",
            Flag(s.offload == Offload::Cpu),
        ),
        (
            "parallelism.data_parallel_replicate_degree",
            Number(d.dp_replicate),
        ),
        ("parallelism.data_parallel_shard_degree", Number(d.dp_shard)),
        ("parallelism.fsdp_reshard_after_forward", Text(reshard(s))),
        ("parallelism.tensor_parallel_degree", Number(d.tp)),
        ("parallelism.context_parallel_degree", Number(d.cp)),
        ("parallelism.pipeline_parallel_degree", Number(d.pp)),
        ("parallelism.expert_parallel_degree", Number(d.ep)),
    ];
    if d.pp > 1 {
        // Others have been replaced.
        let schedule = s.pipeline.schedule.pytorch_name().unwrap_or("1F1B");
        all.push(("parallelism.pipeline_parallel_schedule", Text(schedule)));
        all.push((
            "parallelism.pipeline_parallel_microbatch_size",
            Number(s.micro_batch),
        ));
        let stages = s.pipeline.stages_per_rank;
        let open = s.pipeline.schedule.num_chunks().is_none();
        let length = layers_per_stage(adapted.shape.num_hidden_layers, d.pp, stages);
        if let (true, Some(Some(length))) = (open, length) {
            all.push((
                "parallelism.pipeline_parallel_layers_per_stage",
                Number(length),
            ));
        }
    }
    all
}

/// ZeRO-3 reshards parameters after the forward pass, ZeRO-2 does not. By default, a pipeline does not.
fn reshard(s: &Strategy) -> &'static str {
    match (s.zero_stage, s.degrees.pp > 1) {
        (2, false) => "never",
        (3, true) => "always",
        _ => "default",
    }
}

fn recompute(s: &Strategy) -> &'static str {
    match s.recompute {
        Recompute::None => "none",
        Recompute::SelectiveOp => "selective",
        Recompute::Selective | Recompute::Full => "full",
    }
}

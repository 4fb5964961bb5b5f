//! What is written for other frameworks, given to their own config code.
//!
//! Runs where `bench/frameworks/setup` has installed them; says so and passes where not.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use trainyard_config::{Flavor, LlamaConfig};
use trainyard_plan::{
    Degrees, Experts, Framework, Layers, Offload, Precision, Recompute, Shape, Strategy,
};
use trainyard_schedule::Kind;

/// The environment that `bench/frameworks/setup` makes.
fn environment() -> Option<PathBuf> {
    let under =
        |name: &str, rest: &str| std::env::var_os(name).map(|root| Path::new(&root).join(rest));
    let cache = under("TRAINYARD_CACHE", "")
        .or_else(|| under("XDG_CACHE_HOME", "trainyard"))
        .or_else(|| under("HOME", ".cache/trainyard"))?;
    let folder = cache.join("frameworks");
    folder.join("done").is_file().then_some(folder)
}

/// A config that torchtitan 0.3.0 loads on a machine with a GPU only.
const NEEDS_A_GPU: &str = "--config llama3_405b";

/// A job with the answer that a framework's own code gave.
struct Answered {
    strategy: Strategy,
    shape: Shape,
    text: String,
    answer: Value,
}

/// Every job that the framework takes, with its answer; none where it is not installed.
fn ask(framework: Framework, name: &str, package: &str) -> Option<Vec<Answered>> {
    let Some(folder) = environment() else {
        eprintln!("skipped: no frameworks; run bench/frameworks/setup");
        return None;
    };
    let mut jobs = Vec::new();
    for (shape, strategy) in all() {
        let world = strategy.degrees.world_size();
        let Ok(written) = framework.write(&shape, &strategy, world) else {
            continue;
        };
        // What was written may differ from what was asked for: the losses say so.
        let strategy = framework.read(&written.text).unwrap().strategy;
        if written.text.contains(NEEDS_A_GPU) {
            eprintln!("skipped: {NEEDS_A_GPU}, whose float8 looks for a GPU when it is loaded");
            continue;
        }
        jobs.push((shape, strategy, written.text));
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/frameworks.py");
    let mut child = Command::new(folder.join("bin/python"))
        .arg(script)
        .arg(name)
        .env("PYTHONPATH", folder.join(package))
        .env("CUDA_VISIBLE_DEVICES", "")
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .current_dir(std::env::temp_dir())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let lines: String = jobs
        .iter()
        .map(|(_, strategy, text)| {
            let world = match framework {
                Framework::DeepSpeed => strategy.degrees.data_parallel(),
                _ => strategy.degrees.world_size(),
            };
            json!({ "text": text, "world": world }).to_string() + "\n"
        })
        .collect();
    let mut input = child.stdin.take().unwrap();
    let writer = std::thread::spawn(move || input.write_all(lines.as_bytes()));
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    let answers = String::from_utf8(output.stdout).unwrap();
    let answers: Vec<Value> = answers
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(answers.len(), jobs.len(), "{stderr}");
    let answered = jobs
        .into_iter()
        .zip(answers)
        .map(|((shape, strategy, text), answer)| {
            assert!(
                answer.get("error").is_none(),
                "{framework}: {answer}\n{text}"
            );
            Answered {
                strategy,
                shape,
                text,
                answer,
            }
        });
    let answered: Vec<Answered> = answered.collect();
    eprintln!(
        "{framework}: {} texts parsed by its own code",
        answered.len()
    );
    Some(answered)
}

/// Axes of a mesh: pp, dp_replicate, dp_shard, cp, tp, ep.
const MESHES: [[usize; 6]; 7] = [
    [1, 1, 8, 1, 1, 1],
    [1, 8, 1, 1, 1, 1],
    [1, 2, 4, 1, 1, 4],
    [1, 1, 4, 2, 8, 4],
    [4, 1, 4, 1, 4, 1],
    [8, 2, 2, 2, 8, 2],
    [2, 1, 1, 1, 2, 1],
];

/// Jobs in which every choice is made at least once, on every mesh with every model.
fn all() -> Vec<(Shape, Strategy)> {
    let llama = |flavor| Shape::from(&LlamaConfig::of(flavor));
    let mixture = Shape {
        vocab_size: 151_936,
        hidden_size: 2048,
        intermediate_size: 6144,
        num_hidden_layers: 48,
        num_key_value_heads: 4,
        qk_norm: true,
        experts: Some(Experts::plain(128, 8, 768)),
        ..llama(Flavor::Llama3_8b)
    };
    let shapes = [
        llama(Flavor::Llama3_8b),
        llama(Flavor::Llama3_70b),
        llama(Flavor::Llama3_405b),
        mixture,
    ];
    let pairs = (0..MESHES.len()).flat_map(|mesh| (0..4).map(move |stage| (mesh, stage)));
    pairs
        .map(|(mesh, stage)| {
            let shape = &shapes[(mesh + stage) % shapes.len()];
            (
                shape.clone(),
                strategy(mesh, stage, shape.experts.is_some()),
            )
        })
        .collect()
}

/// One of each list, by steps that do not go together.
fn strategy(mesh: usize, stage: usize, has_experts: bool) -> Strategy {
    let layers = [
        (Kind::OneForwardOneBackward, 1),
        (Kind::Interleaved, 2),
        (Kind::ZeroBubbleV, 2),
        (Kind::GPipe, 1),
        (Kind::DualPipeV, 2),
    ];
    let precisions = [(2, 0, 4, 12), (2, 2, 4, 12), (2, 2, 2, 16), (4, 4, 4, 8)];
    let recompute = [Recompute::None, Recompute::Selective, Recompute::Full];
    let offload = [Offload::None, Offload::None, Offload::Cpu, Offload::Nvme];
    let [pp, dp_replicate, dp_shard, cp, tp, ep] = MESHES[mesh];
    let (schedule, stages_per_rank) = layers[(mesh + stage) % layers.len()];
    let (compute, parameter, gradient, optimizer) =
        precisions[(3 * mesh + stage) % precisions.len()];
    let degrees = Degrees {
        pp,
        dp_replicate,
        dp_shard,
        cp,
        tp,
        ep: if has_experts { ep } else { 1 },
    };
    Strategy {
        degrees,
        zero_stage: stage,
        sequence_parallel: stage.is_multiple_of(2),
        layers: Layers {
            schedule,
            stages_per_rank,
        },
        global_batch: 2 * 16 * degrees.data_parallel(),
        micro_batch: 2,
        seq_len: 8192,
        recompute: recompute[(mesh + stage) % recompute.len()],
        offload: offload[(2 * mesh + stage) % offload.len()],
        precision: Precision {
            compute,
            parameter,
            gradient,
            optimizer,
        },
    }
}

fn same(job: &Answered, key: &str, expected: impl Into<Value>) {
    let expected = expected.into();
    assert_eq!(job.answer[key], expected, "{key} of\n{}", job.text);
}

fn same_degrees(job: &Answered) {
    let d = &job.strategy.degrees;
    for (key, degree) in [
        ("pp", d.pp),
        ("dp_replicate", d.dp_replicate),
        ("dp_shard", d.dp_shard),
        ("cp", d.cp),
        ("tp", d.tp),
        ("ep", d.ep),
    ] {
        same(job, key, degree);
    }
    same(
        job,
        "micro_batch",
        if d.pp > 1 {
            job.strategy.micro_batch
        } else {
            2
        },
    );
    same(job, "global_batch", job.strategy.global_batch);
    same(job, "seq_len", job.strategy.seq_len);
    same(job, "offload", job.strategy.offload == Offload::Cpu);
}

#[test]
fn torchtitan_takes_its_toml() {
    let Some(jobs) = ask(Framework::Torchtitan, "torchtitan", "torchtitan-0.2.2") else {
        return;
    };
    for job in &jobs {
        same_degrees(job);
        let mode = if job.strategy.recompute == Recompute::None {
            "none"
        } else {
            "full"
        };
        same(job, "recompute", mode);
        same(job, "num_layers", job.shape.num_hidden_layers);
        same(job, "hidden_size", job.shape.hidden_size);
    }
}

#[test]
fn torchtitan_takes_its_command_line() {
    let answers = ask(
        Framework::TorchtitanCommandLine,
        "torchtitan-command-line",
        "torchtitan-0.3.0",
    );
    let Some(jobs) = answers else { return };
    for job in &jobs {
        same_degrees(job);
        let mode = if job.strategy.recompute == Recompute::None {
            "none"
        } else {
            "FullAC.Config"
        };
        same(job, "recompute", mode);
        let is_shared = job.strategy.sequence_parallel || job.strategy.degrees.tp == 1;
        same(job, "sequence_parallel", is_shared);
        same(job, "num_layers", job.shape.num_hidden_layers);
        same(job, "hidden_size", job.shape.hidden_size);
    }
}

#[test]
fn deepspeed_takes_its_json() {
    let Some(jobs) = ask(Framework::DeepSpeed, "deepspeed", "") else {
        return;
    };
    for job in &jobs {
        let s = &job.strategy;
        same(job, "global_batch", s.global_batch);
        same(job, "micro_batch", s.micro_batch);
        same(job, "steps", s.num_microbatches());
        same(job, "zero_stage", s.zero_stage);
        same(job, "tp", s.degrees.tp);
        same(job, "bf16", s.precision.compute == 2);
        let device = match s.offload {
            Offload::None => "none",
            Offload::Cpu => "cpu",
            Offload::Nvme => "nvme",
        };
        same(job, "offload_optimizer", device);
        same(job, "offload_param", device);
    }
}

#[test]
fn megatrons_own_config_takes_its_flags() {
    let Some(jobs) = ask(Framework::Megatron, "megatron", "") else {
        return;
    };
    for job in &jobs {
        let (s, shape) = (&job.strategy, &job.shape);
        let d = &s.degrees;
        for (key, number) in [
            ("tensor_model_parallel_size", d.tp),
            ("pipeline_model_parallel_size", d.pp),
            ("context_parallel_size", d.cp),
            ("expert_model_parallel_size", d.ep),
            ("num_layers", shape.num_hidden_layers),
            ("hidden_size", shape.hidden_size),
            ("ffn_hidden_size", shape.intermediate_size),
            ("num_attention_heads", shape.num_attention_heads),
            ("num_query_groups", shape.num_key_value_heads),
            ("kv_channels", shape.head_dim),
        ] {
            same(job, key, number);
        }
        same(job, "sequence_parallel", s.sequence_parallel);
        same(job, "bf16", s.precision.compute == 2);
        same(job, "add_bias_linear", shape.has_biases);
        let granularity = match s.recompute {
            Recompute::None => Value::Null,
            Recompute::Selective => "selective".into(),
            Recompute::Full => "full".into(),
        };
        same(job, "recompute_granularity", granularity);
        let virtual_stages = (s.layers.stages_per_rank > 1).then_some(s.layers.stages_per_rank);
        same(job, "virtual_pipeline_model_parallel_size", virtual_stages);
    }
}

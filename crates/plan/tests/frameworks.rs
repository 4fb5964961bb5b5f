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

/// A text, and what it should say.
struct Job {
    strategy: Strategy,
    shape: Shape,
    text: String,
}

/// A job with the answer that a framework's own code gave.
struct Answered {
    job: Job,
    answer: Value,
}

/// What is written for every job that the framework takes.
fn written(framework: Framework) -> Vec<Job> {
    let mut jobs = Vec::new();
    for (shape, strategy) in all() {
        let world = strategy.degrees.world_size();
        let Ok(written) = framework.write(&shape, &strategy, world) else {
            continue;
        };
        // What was written may differ from what was asked for: the losses say so.
        let read = framework.read(&written.text).unwrap();
        jobs.push(Job {
            strategy: read.strategy,
            shape: read.shape.unwrap_or(shape),
            text: written.text,
        });
    }
    jobs
}

/// Every job with the framework's answer; none where it is not installed.
fn ask(framework: Framework, name: &str, package: &str, jobs: Vec<Job>) -> Option<Vec<Answered>> {
    let Some(folder) = environment() else {
        eprintln!("skipped: no frameworks; run bench/frameworks/setup");
        return None;
    };
    let lines: String = jobs
        .iter()
        .map(|job| {
            let world = match framework {
                Framework::DeepSpeed => job.strategy.degrees.data_parallel(),
                _ => job.strategy.degrees.world_size(),
            };
            json!({ "text": job.text, "world": world }).to_string() + "\n"
        })
        .collect();
    let answers = run(&folder, name, package, lines);
    assert_eq!(answers.len(), jobs.len());
    for (job, answer) in jobs.iter().zip(&answers) {
        let error = answer.get("error");
        assert!(error.is_none(), "{framework}: {answer}\n{}", job.text);
    }
    eprintln!("{framework}: {} texts parsed by its own code", jobs.len());
    let pairs = jobs.into_iter().zip(answers);
    Some(
        pairs
            .map(|(job, answer)| Answered { job, answer })
            .collect(),
    )
}

/// The answers to so many lines.
fn run(folder: &Path, name: &str, package: &str, lines: String) -> Vec<Value> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/frameworks.py");
    let mut child = Command::new(folder.join("bin/python"))
        .arg(script)
        .arg(name)
        .env("PYTHONPATH", folder.join(package))
        .env("CUDA_VISIBLE_DEVICES", "")
        .current_dir(std::env::temp_dir())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    let writer = std::thread::spawn(move || input.write_all(lines.as_bytes()));
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    let answers = String::from_utf8(output.stdout).unwrap();
    let answers = answers.lines().map(serde_json::from_str);
    answers.collect::<Result<_, _>>().unwrap()
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
    let recompute = [
        Recompute::None,
        Recompute::Selective,
        Recompute::Full,
        Recompute::Products,
    ];
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
            reduced: gradient,
            optimizer,
        },
    }
}

impl Answered {
    /// Fails unless the framework understood this.
    fn says(&self, key: &str, expected: impl Into<Value>) {
        let expected = expected.into();
        assert_eq!(self.answer[key], expected, "{key} of\n{}", self.job.text);
    }
}

/// What both versions of torchtitan say.
fn torchtitan_says(answered: &Answered) {
    let (s, shape) = (&answered.job.strategy, &answered.job.shape);
    let d = &s.degrees;
    for (key, number) in [
        ("pp", d.pp),
        ("dp_replicate", d.dp_replicate),
        ("dp_shard", d.dp_shard),
        ("cp", d.cp),
        ("tp", d.tp),
        ("ep", d.ep),
        ("micro_batch", s.micro_batch),
        ("global_batch", s.global_batch),
        ("seq_len", s.seq_len),
        ("num_layers", shape.num_hidden_layers),
        ("hidden_size", shape.hidden_size),
    ] {
        answered.says(key, number);
    }
    answered.says("offload", s.offload == Offload::Cpu);
    answered.says("recomputes", s.recompute != Recompute::None);
}

#[test]
fn torchtitan_takes_its_toml() {
    let framework = Framework::Torchtitan;
    let jobs = ask(
        framework,
        "torchtitan",
        "torchtitan-0.2.2",
        written(framework),
    );
    jobs.iter().flatten().for_each(torchtitan_says);
}

#[test]
fn torchtitan_takes_its_command_line() {
    let framework = Framework::TorchtitanCommandLine;
    let (name, package) = ("torchtitan-command-line", "torchtitan-0.3.0");
    let jobs = ask(framework, name, package, written(framework));
    for answered in jobs.iter().flatten() {
        torchtitan_says(answered);
        let s = &answered.job.strategy;
        answered.says(
            "sequence_parallel",
            s.sequence_parallel || s.degrees.tp == 1,
        );
    }
}

/// The shapes that we have for torchtitan's names are those it has.
#[test]
fn torchtitans_models_are_as_we_have_them() {
    let models = [
        ("llama3", "debugmodel 8B 70B 405B"),
        ("qwen3", "0.6B 1.7B 4B 8B 14B 32B 30B-A3B 235B-A22B"),
    ];
    let names = models
        .iter()
        .flat_map(|(module, names)| names.split(' ').map(move |name| (module, name)));
    let framework = Framework::Torchtitan;
    let jobs = names.map(|(module, name)| {
        let text = format!(
            "[model]\nname = \"{module}\"\nflavor = \"{name}\"\n[training]\nglobal_batch_size = 8\n\
             [parallelism]\ndata_parallel_shard_degree = 1\n[activation_checkpoint]\nmode = \"full\"\n"
        );
        let read = framework.read(&text).unwrap();
        Job {
            strategy: read.strategy,
            shape: read.shape.unwrap(),
            text,
        }
    });
    let jobs = ask(framework, "torchtitan", "torchtitan-0.2.2", jobs.collect());
    for answered in jobs.iter().flatten() {
        torchtitan_says(answered);
        let shape = &answered.job.shape;
        for (key, number) in [
            ("vocab_size", shape.vocab_size),
            ("intermediate_size", shape.intermediate_size),
            ("num_attention_heads", shape.num_attention_heads),
            ("num_key_value_heads", shape.num_key_value_heads),
            ("head_dim", shape.head_dim),
        ] {
            answered.says(key, number);
        }
        answered.says("tie_word_embeddings", shape.tie_word_embeddings);
        let experts = shape.experts.as_ref();
        let experts = experts.map(|e| {
            [
                e.num_experts,
                e.num_experts_per_tok,
                e.moe_intermediate_size,
            ]
        });
        answered.says("experts", json!(experts));
    }
}

#[test]
fn deepspeed_takes_its_json() {
    let framework = Framework::DeepSpeed;
    let jobs = ask(framework, "deepspeed", "", written(framework));
    for answered in jobs.iter().flatten() {
        let s = &answered.job.strategy;
        answered.says("global_batch", s.global_batch);
        answered.says("micro_batch", s.micro_batch);
        answered.says("steps", s.num_microbatches());
        answered.says("zero_stage", s.zero_stage);
        answered.says("tp", s.degrees.tp);
        answered.says("bf16", s.precision.compute == 2);
        let is_wide = s.precision.compute == 2 && s.precision.gradient == 4;
        answered.says("grad_accum_dtype", is_wide.then_some("fp32"));
        let device = match s.offload {
            Offload::None => "none",
            Offload::Cpu => "cpu",
            Offload::Nvme => "nvme",
        };
        answered.says("offload_optimizer", device);
        answered.says("offload_param", device);
    }
}

#[test]
fn megatrons_own_config_takes_its_flags() {
    let framework = Framework::Megatron;
    let jobs = ask(framework, "megatron", "", written(framework));
    for answered in jobs.iter().flatten() {
        let (s, shape) = (&answered.job.strategy, &answered.job.shape);
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
            answered.says(key, number);
        }
        answered.says("sequence_parallel", s.sequence_parallel);
        answered.says("bf16", s.precision.compute == 2);
        answered.says("add_bias_linear", shape.has_biases);
        let granularity = match s.recompute {
            Recompute::None => None,
            Recompute::Selective => Some("selective"),
            Recompute::Products | Recompute::Full => Some("full"),
        };
        answered.says("recompute_granularity", granularity);
        let stages = s.layers.stages_per_rank;
        let is_interleaved = stages > 1;
        answered.says(
            "virtual_pipeline_model_parallel_size",
            is_interleaved.then_some(stages),
        );
    }
}

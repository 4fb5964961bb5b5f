//! The frameworks' own config code accepts the configs that Trainyard writes for them.
//!
//! `bench/frameworks/setup` installs the frameworks. Without them, the tests print that they are skipped, and pass.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use trainyard_arch::{DecoderConfig, MoeConfig};

use serde_json::{Value, json};
use trainyard_arch::Flavor;
use trainyard_interop::Framework;
use trainyard_plan::{
    Degrees, Offload, PipelineLayout, Precision, Recompute, Strategy, Synchronization,
};
use trainyard_schedule::ScheduleKind;

/// The Python environment that `bench/frameworks/setup` creates, if it is complete.
fn environment() -> Option<PathBuf> {
    let under =
        |name: &str, rest: &str| std::env::var_os(name).map(|root| Path::new(&root).join(rest));
    let cache = under("TRAINYARD_CACHE", "")
        .or_else(|| under("XDG_CACHE_HOME", "trainyard"))
        .or_else(|| under("HOME", ".cache/trainyard"))?;
    let dir = cache.join("frameworks");
    dir.join("done").is_file().then_some(dir)
}

/// A config, with the strategy and model that it describes.
struct Job {
    strategy: Strategy,
    shape: DecoderConfig,
    text: String,
}

/// A job with the values that the framework's own code parsed from its config.
struct ParsedByFramework {
    job: Job,
    values: Value,
}

/// The configs of every job that the framework supports.
fn emitted(framework: Framework) -> Vec<Job> {
    let mut jobs = Vec::new();
    for (shape, strategy) in all() {
        let world = strategy.degrees.world_size();
        let Ok(written) = framework.write(&shape, &strategy, world) else {
            continue;
        };
        // The config may differ from the request, as its deviations report.
        let read = framework.read(&written.text).unwrap();
        jobs.push(Job {
            strategy: read.strategy,
            shape: read.shape.unwrap_or(shape),
            text: written.text,
        });
    }
    jobs
}

/// Every job as the framework's own code parses it, or `None` if the framework is not installed.
fn parse_with_framework(
    framework: Framework,
    name: &str,
    package: &str,
    jobs: Vec<Job>,
) -> Option<Vec<ParsedByFramework>> {
    let Some(dir) = environment() else {
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
    let parsed = run(&dir, name, package, lines);
    assert_eq!(parsed.len(), jobs.len());
    for (job, values) in jobs.iter().zip(&parsed) {
        let error = values.get("error");
        assert!(error.is_none(), "{framework}: {values}\n{}", job.text);
    }
    eprintln!("{framework}: its own code parsed {} configs", jobs.len());
    let pairs = jobs.into_iter().zip(parsed);
    Some(
        pairs
            .map(|(job, values)| ParsedByFramework { job, values })
            .collect(),
    )
}

/// Runs `frameworks.py` with one JSON line per config, and returns the parsed values of each.
fn run(dir: &Path, name: &str, package: &str, lines: String) -> Vec<Value> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/integration/frameworks.py");
    let mut child = Command::new(dir.join("bin/python"))
        .arg(script)
        .arg(name)
        .env("PYTHONPATH", dir.join(package))
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
    let stdout = String::from_utf8(output.stdout).unwrap();
    let parsed = stdout.lines().map(serde_json::from_str);
    parsed.collect::<Result<_, _>>().unwrap()
}

/// Parallel degrees: pp, dp_replicate, dp_shard, cp, tp, ep.
const MESHES: [[usize; 6]; 7] = [
    [1, 1, 8, 1, 1, 1],
    [1, 8, 1, 1, 1, 1],
    [1, 2, 4, 1, 1, 4],
    [1, 1, 4, 2, 8, 4],
    [4, 1, 4, 1, 4, 1],
    [8, 2, 2, 2, 8, 2],
    [2, 1, 1, 1, 2, 1],
];

/// Jobs that cover every setting at least once, on every mesh and with every model.
fn all() -> Vec<(DecoderConfig, Strategy)> {
    let llama = |flavor| DecoderConfig::from(flavor);
    let mixture = DecoderConfig {
        vocab_size: 151_936,
        hidden_size: 2048,
        intermediate_size: 6144,
        num_hidden_layers: 48,
        num_key_value_heads: 4,
        qk_norm: Some(trainyard_arch::QkNorm::Head),
        moe: Some(MoeConfig::plain(128, 8, 768)),
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
            (shape.clone(), strategy(mesh, stage, shape.moe.is_some()))
        })
        .collect()
}

/// Takes one element of each list, with different strides so that the combinations vary.
fn strategy(mesh: usize, stage: usize, has_experts: bool) -> Strategy {
    let layers = [
        (ScheduleKind::OneForwardOneBackward, 1),
        (ScheduleKind::Interleaved, 2),
        (ScheduleKind::ZeroBubbleV, 2),
        (ScheduleKind::GPipe, 1),
        (ScheduleKind::DualPipeV, 2),
    ];
    let precisions = [(2, 0, 4, 12), (2, 2, 4, 12), (2, 2, 2, 16), (4, 4, 4, 8)];
    let recompute = [
        Recompute::None,
        Recompute::Selective,
        Recompute::Full,
        Recompute::SelectiveOp,
    ];
    let offload = [Offload::None, Offload::None, Offload::Cpu, Offload::Nvme];
    let [pp, dp_replicate, dp_shard, cp, tp, ep] = MESHES[mesh];
    let (schedule, stages_per_rank) = layers[(mesh + stage) % layers.len()];
    let (compute, parameter, gradient, optimizer) =
        precisions[(3 * mesh + stage) % precisions.len()];
    let degrees = Degrees {
        dp_outer: 1,
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
        pipeline: PipelineLayout {
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
        synchronization: Synchronization::PLAIN,
        split_points: Vec::new(),
    }
}

impl ParsedByFramework {
    /// Fails unless the framework parsed this value.
    fn assert_value(&self, key: &str, expected: impl Into<Value>) {
        let expected = expected.into();
        assert_eq!(self.values[key], expected, "{key} of\n{}", self.job.text);
    }
}

/// Checks the values that both versions of torchtitan report.
fn check_torchtitan(parsed: &ParsedByFramework) {
    let (s, shape) = (&parsed.job.strategy, &parsed.job.shape);
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
        parsed.assert_value(key, number);
    }
    parsed.assert_value("offload", s.offload == Offload::Cpu);
    parsed.assert_value("recomputes", s.recompute != Recompute::None);
}

#[test]
#[ignore = "full: needs the packages of bench/frameworks/setup"]
fn torchtitan_accepts_its_toml() {
    let framework = Framework::Torchtitan;
    let jobs = parse_with_framework(
        framework,
        "torchtitan",
        "torchtitan-0.2.2",
        emitted(framework),
    );
    jobs.iter().flatten().for_each(check_torchtitan);
}

#[test]
#[ignore = "full: needs the packages of bench/frameworks/setup"]
fn torchtitan_accepts_its_command_line() {
    let framework = Framework::TorchtitanCommandLine;
    let (name, package) = ("torchtitan-command-line", "torchtitan-0.3.0");
    let jobs = parse_with_framework(framework, name, package, emitted(framework));
    for parsed in jobs.iter().flatten() {
        check_torchtitan(parsed);
        let s = &parsed.job.strategy;
        parsed.assert_value(
            "sequence_parallel",
            s.sequence_parallel || s.degrees.tp == 1,
        );
    }
}

/// Our table of torchtitan's models has the shapes that torchtitan registers.
#[test]
#[ignore = "full: needs the packages of bench/frameworks/setup"]
fn torchtitan_models_match_ours() {
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
    let jobs = parse_with_framework(framework, "torchtitan", "torchtitan-0.2.2", jobs.collect());
    for parsed in jobs.iter().flatten() {
        check_torchtitan(parsed);
        let shape = &parsed.job.shape;
        for (key, number) in [
            ("vocab_size", shape.vocab_size),
            ("intermediate_size", shape.intermediate_size),
            ("num_attention_heads", shape.num_attention_heads),
            ("num_key_value_heads", shape.num_key_value_heads),
            ("head_dim", shape.head_dim),
        ] {
            parsed.assert_value(key, number);
        }
        parsed.assert_value("tie_word_embeddings", shape.tie_word_embeddings);
        let experts = shape.moe.as_ref();
        let experts = experts.map(|e| {
            [
                e.num_experts,
                e.num_experts_per_tok,
                e.moe_intermediate_size,
            ]
        });
        parsed.assert_value("experts", json!(experts));
    }
}

#[test]
#[ignore = "full: needs the packages of bench/frameworks/setup"]
fn deepspeed_accepts_its_json() {
    let framework = Framework::DeepSpeed;
    let jobs = parse_with_framework(framework, "deepspeed", "", emitted(framework));
    for parsed in jobs.iter().flatten() {
        let s = &parsed.job.strategy;
        parsed.assert_value("global_batch", s.global_batch);
        parsed.assert_value("micro_batch", s.micro_batch);
        parsed.assert_value("steps", s.num_microbatches());
        parsed.assert_value("zero_stage", s.zero_stage);
        parsed.assert_value("tp", s.degrees.tp);
        parsed.assert_value("bf16", s.precision.compute == 2);
        let is_wide = s.precision.compute == 2 && s.precision.gradient == 4;
        parsed.assert_value("grad_accum_dtype", is_wide.then_some("fp32"));
        let device = match s.offload {
            Offload::None => "none",
            Offload::Cpu => "cpu",
            Offload::Nvme => "nvme",
        };
        parsed.assert_value("offload_optimizer", device);
        parsed.assert_value("offload_param", device);
    }
}

#[test]
#[ignore = "full: needs the packages of bench/frameworks/setup"]
fn megatron_accepts_its_flags() {
    let framework = Framework::Megatron;
    let jobs = parse_with_framework(framework, "megatron", "", emitted(framework));
    for parsed in jobs.iter().flatten() {
        let (s, shape) = (&parsed.job.strategy, &parsed.job.shape);
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
            parsed.assert_value(key, number);
        }
        parsed.assert_value("sequence_parallel", s.sequence_parallel);
        parsed.assert_value("bf16", s.precision.compute == 2);
        parsed.assert_value("add_bias_linear", shape.has_biases);
        let granularity = match s.recompute {
            Recompute::None => None,
            Recompute::Selective => Some("selective"),
            Recompute::SelectiveOp | Recompute::Full => Some("full"),
        };
        parsed.assert_value("recompute_granularity", granularity);
        let stages = s.pipeline.stages_per_rank;
        let is_interleaved = stages > 1;
        parsed.assert_value(
            "virtual_pipeline_model_parallel_size",
            is_interleaved.then_some(stages),
        );
    }
}

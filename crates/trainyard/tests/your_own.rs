//! A program with components of its own, the one that `trainyard new` writes: it trains, resumes on another number of
//! ranks, is verified and dry-run, and rejects what it does not know. This program is also the trampoline for the ranks
//! it starts.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Output};

use libtest_mimic::{Arguments, Failed, Trial};
use trainyard_launcher::{Console, Job, launch, worker};

const CONFIG: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../cli/template/config.toml");

fn main() -> ExitCode {
    if let Some(code) = worker::intercept() {
        return code;
    }
    let trials: [(&str, fn()); 5] = [
        ("it_trains_and_resumes_on_one_rank", trains_and_resumes),
        ("strategies_equal_one_rank", verify),
        ("a_dry_run_counts_its_parameters", dry_run),
        ("it_is_planned_for_a_cluster", plan),
        ("unknown_names_and_keys_are_rejected", rejections),
    ];
    let as_trial = |(name, test): (&str, fn())| {
        Trial::test(name, move || {
            test();
            Ok::<(), Failed>(())
        })
    };
    let trials = trials.into_iter().map(as_trial).collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// Two ranks train sharded, and one rank goes on with their checkpoint.
fn trains_and_resumes() {
    let folder = tempfile::tempdir().unwrap();
    let outputs = folder.path().join("outputs");
    let keys = |steps: &str| {
        let outputs = outputs.display().to_string();
        [
            CONFIG,
            "--metrics.enable_jsonl",
            "true",
            "--training.steps",
            steps,
            "--job.dump_folder",
            &outputs,
        ]
        .map(String::from)
        .to_vec()
    };
    let shards = [
        "--parallelism.data_parallel_replicate_degree=1",
        "--parallelism.data_parallel_shard_degree=2",
    ];
    let args = [keys("200"), shards.map(String::from).to_vec()].concat();
    let job = Job::new(program(), 2).args(&args).console(Console::Silent);
    let outcome = launch(&job).unwrap();
    assert!(
        outcome.is_success(),
        "{}",
        outcome.report().unwrap_or_default()
    );
    let output = run(&keys("400"));
    assert!(output.status.success(), "{}", text(&output));

    let metrics = std::fs::read_to_string(outputs.join("metrics.jsonl")).unwrap();
    let lines = metrics
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let losses: Vec<(u64, f64)> = lines
        .filter_map(|line| Some((line["step"].as_u64()?, line["loss"].as_f64()?)))
        .collect();
    let (first, last) = (losses[0], losses[losses.len() - 1]);
    assert_eq!((first.0, last.0), (1, 400));
    assert!(last.1 < 0.5 * first.1, "{losses:?}");
    // One rank did not start again.
    assert_eq!(
        losses.iter().filter(|(step, _)| *step == 1).count(),
        1,
        "{losses:?}"
    );
}

/// Replicas, shards of every stage, and two pipeline stages.
fn verify() {
    let sharded = |stage: &str| {
        let stage = format!("--parallelism.zero_stage={stage}");
        let degrees = [
            "--parallelism.data_parallel_replicate_degree=1",
            "--parallelism.data_parallel_shard_degree=2",
        ];
        [degrees.map(String::from).to_vec(), vec![stage]].concat()
    };
    let piped = [
        "--parallelism.data_parallel_replicate_degree=1",
        "--parallelism.pipeline_parallel_degree=2",
        "--parallelism.pipeline_parallel_split_points=layers.1",
        "--shrink",
    ];
    for keys in [
        Vec::new(),
        sharded("1"),
        sharded("3"),
        piped.map(String::from).to_vec(),
    ] {
        let args = ["verify", CONFIG, "--nproc", "2", "--steps", "3"].map(String::from);
        let output = run(&[args.to_vec(), keys.clone()].concat());
        assert!(output.status.success(), "{keys:?}: {}", text(&output));
    }
}

fn dry_run() {
    let output = run(&["dry-run", CONFIG, "--world", "4", "--json"].map(String::from));
    assert!(output.status.success(), "{}", text(&output));
    let found: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    // 2 to 64 to 64 to 2, with biases.
    let expected = 2 * 64 + 64 + 64 * 64 + 64 + 64 * 2 + 2;
    assert_eq!(found["num_parameters"], expected);
    assert_eq!(found["states"], found["states_by_formula"]);

    // Points have no positions to divide.
    let args = [
        "dry-run",
        CONFIG,
        "--world",
        "2",
        "--parallelism.context_parallel_degree=2",
    ];
    let output = run(&args.map(String::from));
    assert!(
        text(&output).contains("context parallelism divides"),
        "{}",
        text(&output)
    );
}

/// The planner needs no description of the model: it counts in dry runs of this program.
fn plan() {
    let args = [
        "plan",
        "--model",
        CONFIG,
        "--cluster",
        "2xH100",
        "--global-batch",
        "64",
        "--json",
    ];
    let output = run(&args.map(String::from));
    assert!(output.status.success(), "{}", text(&output));
    let found: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let plans = found["plans"].as_array().unwrap();
    let stages: Vec<u64> = plans
        .iter()
        .filter_map(|plan| plan["zero_stage"].as_u64())
        .collect();
    for stage in 0..=3 {
        assert!(stages.contains(&stage), "{stages:?}");
    }
    // Its layers are not divided over tensor-parallel ranks, and the plan says so instead of computing them twice.
    let impossible = found["impossible"].as_array().unwrap();
    let tensor = impossible
        .iter()
        .find(|row| row["layout"]["mesh"]["tp"] == 2);
    let why = tensor.unwrap()["why"].as_str().unwrap();
    assert!(why.contains("tensor-parallel"), "{why}");
}

fn rejections() {
    for (key, said) in [
        ("--custom.mlp.widths=3", "did you mean custom.mlp.width?"),
        ("--custom.mpl.width=3", "[custom.mpl]"),
        ("--model.name=mpl", "did you mean \"mlp\"?"),
        ("--training.loss=hinge", "training.loss = \"hinge\""),
        ("--lr_scheduler.name=wave", "lr_scheduler.name = \"wave\""),
        ("--model.hidden_size=3", "[custom.mlp]"),
        ("--custom.mlp.width.x=3", "width is a value, not a section"),
        ("--parallelism.auto=true", "TRAINYARD_ENGINE"),
    ] {
        let output = run(&[CONFIG, key].map(String::from));
        assert!(!output.status.success(), "{key}");
        assert!(text(&output).contains(said), "{key}: {}", text(&output));
    }
}

/// Runs the program without a launcher.
fn run(args: &[String]) -> Output {
    let mut command = Command::new(program());
    for variable in ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"] {
        command.env_remove(variable);
    }
    command.args(args).output().unwrap()
}

fn text(output: &Output) -> String {
    [&output.stdout, &output.stderr]
        .map(|bytes| String::from_utf8_lossy(bytes))
        .concat()
}

/// The path of the program: Cargo puts examples next to the directory of this test program.
fn program() -> PathBuf {
    let own = std::env::current_exe().unwrap();
    let profile = own.parent().and_then(Path::parent).unwrap();
    profile.join("examples/your_own")
}

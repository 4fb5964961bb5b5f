//! Runs the examples as a user would: their losses decrease, and results do not depend on the number of
//! ranks. This program is also the trampoline for the ranks it starts.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use libtest_mimic::{Arguments, Failed, Trial};
use trainyard_launcher::{Console, Job, launch, worker};

/// The slowest ones: `.ci/run --full` runs them, and conformance tests their strategies in every run.
const FULL_ONLY: [&str; 2] = [
    "hybrid_3d_on_eight_ranks_equals_one_rank",
    "moe_on_two_ranks_equals_one_rank",
];

fn main() -> ExitCode {
    if let Some(code) = worker::intercept() {
        return code;
    }
    let trials: [(&str, fn()); 13] = [
        (
            "ddp_runs_without_launcher_and_the_loss_decreases",
            ddp_single,
        ),
        ("ddp_on_two_ranks_equals_one_rank", ddp_on_two_ranks),
        ("data_parallel_trains_with_two_threads", data_parallel),
        ("fsdp_on_two_ranks_is_close_to_one_rank", fsdp),
        ("zero_memory_equals_the_formula", zero),
        ("a_checkpoint_of_two_ranks_loads_on_one", checkpoint),
        ("tensor_parallel_on_two_ranks_equals_one_rank", || {
            equals_one_rank("tensor_parallel");
        }),
        ("tensor_parallel_runs_on_four_ranks", || {
            on_ranks("tensor_parallel", 4);
        }),
        ("context_parallel_on_two_ranks_equals_one_rank", || {
            equals_one_rank("context_parallel");
        }),
        ("pipeline_on_two_ranks_equals_one_rank", || {
            equals_one_rank("pipeline");
        }),
        ("hybrid_3d_on_eight_ranks_equals_one_rank", hybrid),
        ("moe_on_two_ranks_equals_one_rank", || {
            equals_one_rank("moe");
        }),
        ("layer_parallel_on_two_ranks_equals_one_rank", || {
            equals_one_rank("layer_parallel");
        }),
    ];
    let as_trial = |(name, test): (&str, fn())| {
        Trial::test(name, move || {
            test();
            Ok::<(), Failed>(())
        })
        .with_ignored_flag(FULL_ONLY.contains(&name))
    };
    let trials = trials.into_iter().map(as_trial).collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

fn ddp_single() {
    assert_decreases(&single("ddp"));
}

fn ddp_on_two_ranks() {
    assert_decreases(&equals_one_rank("ddp"));
}

/// Asserts that an example has the same losses on two ranks and on one, and returns them.
fn equals_one_rank(example: &str) -> Vec<f64> {
    let distributed = on_ranks(example, 2);
    let single = single(example);
    assert_close(&distributed, &single, 2);
    distributed
}

fn data_parallel() {
    assert_decreases(&single("data_parallel"));
}

fn fsdp() {
    let (distributed, single) = (on_ranks("fsdp", 2), single("fsdp"));
    assert!(distributed.len() >= 10 && distributed.len() == single.len());
    for (step, (distributed, single)) in distributed.iter().zip(&single).enumerate() {
        // In bfloat16 the two halves of the batch are rounded separately.
        assert!(
            (distributed - single).abs() < 5e-2,
            "step {step}: {distributed} on two ranks, {single} on one"
        );
    }
}

fn zero() {
    // The example itself compares each stage with the formula.
    on_ranks("zero", 2);
}

/// Two ranks save after steps 10 and 20; one rank repeats the last ten steps from the first checkpoint.
fn checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let logs = tempfile::tempdir().unwrap();
    let job = Job::new(program("checkpoint"), 2)
        .args([folder.path()])
        .console(Console::Silent)
        .log_dir(logs.path());
    finish(&job);
    let on_two = losses(&stdout(logs.path(), 0));
    assert_eq!(on_two.len(), 20);
    std::fs::remove_dir_all(folder.path().join("step-20")).unwrap();
    let output = Command::new(program("checkpoint"))
        .arg(folder.path())
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let on_one = losses(&String::from_utf8_lossy(&output.stdout));
    assert_close(&on_two[10..], &on_one, 2);
}

fn hybrid() {
    let (distributed, single) = (on_ranks("hybrid_3d", 8), single("hybrid_3d"));
    assert_close(&distributed, &single, 8);
}

/// The examples print six decimals, so what printing rounds away is far below the bound.
fn assert_close(distributed: &[f64], single: &[f64], num_ranks: usize) {
    assert_eq!(distributed.len(), single.len());
    for (step, (distributed, single)) in distributed.iter().zip(single).enumerate() {
        assert!(
            (distributed - single).abs() < 1e-4,
            "step {step}: {distributed} on {num_ranks} ranks, {single} on one"
        );
    }
}

fn assert_decreases(losses: &[f64]) {
    assert!(losses.len() >= 10, "{losses:?}");
    assert!(losses[losses.len() - 1] < 0.5 * losses[0], "{losses:?}");
}

/// The losses of an example that is started without a launcher.
fn single(example: &str) -> Vec<f64> {
    let mut command = Command::new(program(example));
    for variable in ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"] {
        command.env_remove(variable);
    }
    let output = command.output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    losses(&String::from_utf8_lossy(&output.stdout))
}

/// The losses of an example on several ranks, from the output of all of them.
fn on_ranks(example: &str, num_ranks: usize) -> Vec<f64> {
    let logs = tempfile::tempdir().unwrap();
    let job = Job::new(program(example), num_ranks)
        .console(Console::Silent)
        .log_dir(logs.path());
    finish(&job);
    let of_rank = |rank| losses(&stdout(logs.path(), rank));
    (0..num_ranks).flat_map(of_rank).collect()
}

/// Runs a job, which must succeed.
fn finish(job: &Job) {
    let outcome = launch(job).unwrap();
    assert!(
        outcome.is_success(),
        "{}",
        outcome.report().unwrap_or_default()
    );
}

fn stdout(logs: &Path, rank: usize) -> String {
    std::fs::read_to_string(logs.join(rank.to_string()).join("stdout.log")).unwrap()
}

/// The values after `loss` in each line.
fn losses(text: &str) -> Vec<f64> {
    let parts = text.lines().filter_map(|line| line.split_once(" loss "));
    parts
        .map(|(_, loss)| loss.trim().parse().unwrap())
        .collect()
}

/// The path of an example: Cargo puts examples next to the directory of this test program.
fn program(example: &str) -> PathBuf {
    let own = std::env::current_exe().unwrap();
    let profile = own.parent().and_then(Path::parent).unwrap();
    let program = profile.join("examples").join(example);
    let hint = "run `cargo build --examples -p trainyard`";
    assert!(
        program.is_file(),
        "{} is missing: {hint}",
        program.display()
    );
    program
}

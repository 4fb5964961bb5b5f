//! The examples, run as a reader would run them: their losses fall, and the number of ranks does
//! not change what they compute. The program is its own trampoline for the ranks it starts.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use libtest_mimic::{Arguments, Failed, Trial};
use trainyard_elastic::{Console, Job, launch, worker};

fn main() -> ExitCode {
    if let Some(code) = worker::intercept() {
        return code;
    }
    let trials: [(&str, fn()); 12] = [
        ("ddp_runs_alone_and_the_loss_falls", ddp_alone),
        ("ddp_on_two_ranks_computes_the_same", ddp_on_two_ranks),
        ("data_parallel_trains_with_two_threads", data_parallel),
        ("fsdp_on_two_ranks_is_close_to_one", fsdp),
        ("zero_holds_what_the_formula_says", zero),
        ("tensor_parallel_on_two_ranks_computes_the_same", || {
            same_on_two_ranks("tensor_parallel");
        }),
        ("tensor_parallel_runs_on_four_ranks", || {
            on_ranks("tensor_parallel", 4);
        }),
        ("context_parallel_on_two_ranks_computes_the_same", || {
            same_on_two_ranks("context_parallel");
        }),
        ("pipeline_on_two_ranks_computes_the_same", || {
            same_on_two_ranks("pipeline");
        }),
        ("hybrid_3d_on_eight_ranks_computes_the_same", hybrid),
        ("moe_on_two_ranks_computes_the_same", || {
            same_on_two_ranks("moe");
        }),
        ("layer_parallel_on_two_ranks_computes_the_same", || {
            same_on_two_ranks("layer_parallel");
        }),
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

fn ddp_alone() {
    assert_falls(&alone("ddp"));
}

fn ddp_on_two_ranks() {
    assert_falls(&same_on_two_ranks("ddp"));
}

/// Its losses on two ranks, which are those on one.
fn same_on_two_ranks(example: &str) -> Vec<f64> {
    let together = on_ranks(example, 2);
    let alone = alone(example);
    assert_close(&together, &alone, 2);
    together
}

fn data_parallel() {
    assert_falls(&alone("data_parallel"));
}

fn fsdp() {
    let (together, alone) = (on_ranks("fsdp", 2), alone("fsdp"));
    assert!(together.len() >= 10 && together.len() == alone.len());
    for (step, (together, alone)) in together.iter().zip(&alone).enumerate() {
        // bfloat16: the halves of the batch are rounded apart.
        assert!(
            (together - alone).abs() < 5e-2,
            "step {step}: {together} on two ranks, {alone} on one"
        );
    }
}

fn zero() {
    // It compares by itself, and fails where a stage holds anything else.
    on_ranks("zero", 2);
}

fn hybrid() {
    let (together, alone) = (on_ranks("hybrid_3d", 8), alone("hybrid_3d"));
    assert_close(&together, &alone, 8);
}

fn assert_close(together: &[f64], alone: &[f64], num_ranks: usize) {
    assert_eq!(together.len(), alone.len());
    for (step, (together, alone)) in together.iter().zip(alone).enumerate() {
        assert!(
            (together - alone).abs() < 1e-4,
            "step {step}: {together} on {num_ranks} ranks, {alone} on one"
        );
    }
}

fn assert_falls(losses: &[f64]) {
    assert!(losses.len() >= 10, "{losses:?}");
    assert!(losses[losses.len() - 1] < 0.5 * losses[0], "{losses:?}");
}

/// The losses an example prints when it is started by itself.
fn alone(example: &str) -> Vec<f64> {
    let mut command = Command::new(program(example));
    for variable in ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"] {
        command.env_remove(variable);
    }
    let output = command.output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    losses(&String::from_utf8_lossy(&output.stdout))
}

/// The losses that whichever rank has them prints when the launcher starts several.
fn on_ranks(example: &str, num_ranks: usize) -> Vec<f64> {
    let logs = tempfile::tempdir().unwrap();
    let job = Job::new(program(example), num_ranks)
        .console(Console::Silent)
        .log_dir(logs.path());
    let outcome = launch(&job).unwrap();
    assert!(
        outcome.is_success(),
        "{}",
        outcome.report().unwrap_or_default()
    );
    let of_rank = |rank| losses(&stdout(logs.path(), rank));
    (0..num_ranks).flat_map(of_rank).collect()
}

fn stdout(logs: &Path, rank: usize) -> String {
    std::fs::read_to_string(logs.join(rank.to_string()).join("stdout.log")).unwrap()
}

/// The numbers after `loss`, in order of steps.
fn losses(text: &str) -> Vec<f64> {
    let parts = text.lines().filter_map(|line| line.split_once(" loss "));
    parts
        .map(|(_, loss)| loss.trim().parse().unwrap())
        .collect()
}

/// Cargo puts examples beside the folder this test is in.
fn program(example: &str) -> PathBuf {
    let own = std::env::current_exe().unwrap();
    let profile = own.parent().and_then(Path::parent).unwrap();
    let program = profile.join("examples").join(example);
    let hint = "`cargo build --examples -p trainyard` makes it";
    assert!(
        program.is_file(),
        "{} is missing: {hint}",
        program.display()
    );
    program
}

//! PyTorch as the oracle: the same weights and data give the same losses and gradient norms.

use std::process::{Command, ExitCode};
use std::thread;

use libtest_mimic::{Failed, Trial};
use serde::Deserialize;
use trainyard_conformance::in_turn;
use trainyard_conformance::programs::{find, json, python, repository, run};
use trainyard_conformance::training::assert_close;

/// What PyTorch's own strategies show among themselves is about a tenth of it.
const ALLOWED: f64 = 1e-5;

const NUM_STEPS: usize = 20;

/// A preset, and how many steps of it are compared on two ranks.
#[derive(Clone, Copy)]
struct Preset {
    name: &'static str,
    test: &'static str,
    ddp_steps: usize,
}

const PRESETS: [Preset; 3] = [
    Preset {
        name: "tiny",
        test: "tiny",
        ddp_steps: NUM_STEPS,
    },
    // A step takes seconds. One rank shows all twenty steps, two show enough.
    Preset {
        name: "small",
        test: "small_which_takes_minutes",
        ddp_steps: 6,
    },
    Preset {
        name: "cnn",
        test: "cnn",
        ddp_steps: NUM_STEPS,
    },
];

fn main() -> ExitCode {
    let trials = PRESETS.map(|preset| match python() {
        Ok(_) => Trial::test(format!("pytorch_agrees_on_{}", preset.test), move || {
            agrees(preset)
        }),
        // Told where tests are listed, so that every runner shows it as skipped, and why.
        Err(reason) => Trial::test(
            format!("pytorch_agrees_on_{} (skipped: {reason})", preset.test),
            || Ok(()),
        )
        .with_ignored_flag(true),
    });
    in_turn(trials.into())
}

/// The line that peers and our own program print.
#[derive(Deserialize)]
struct Line {
    losses: Vec<f64>,
    grad_norms: Vec<f64>,
}

fn agrees(preset: Preset) -> Result<(), Failed> {
    // Side by side: each is one thread, and neither is timed.
    let ours = thread::spawn(move || single(preset));
    let theirs = line(
        Command::new(python()?)
            .arg(repository("bench/peers/peer.py"))
            .args(["--strategy", "single"])
            .args(workload(preset, NUM_STEPS)),
    )?;
    let ours = ours.join().map_err(|_| "the run on one rank panicked")??;
    compare("one rank", &ours, &theirs);
    compare("two ranks", &ddp(preset)?, &theirs);
    Ok(())
}

fn compare(who: &str, ours: &Line, theirs: &Line) {
    let num_steps = ours.losses.len();
    let of = |all: &[f64]| all[..num_steps].to_vec();
    let what = format!("{who}: loss of step");
    assert_close(&what, &ours.losses, &of(&theirs.losses), ALLOWED);
    let what = format!("{who}: gradient norm of step");
    assert_close(&what, &ours.grad_norms, &of(&theirs.grad_norms), ALLOWED);
}

fn single(preset: Preset) -> Result<Line, String> {
    line(
        Command::new(find("trainyard-engine")?)
            .args(["bench-step", "--strategy", "single"])
            .args(workload(preset, NUM_STEPS)),
    )
}

fn ddp(preset: Preset) -> Result<Line, String> {
    line(
        Command::new(find("trainyard")?)
            .args(["run", "--standalone", "--nproc-per-node", "2", "--"])
            .arg(find("trainyard-engine")?)
            .args(["bench-step", "--strategy", "ddp"])
            .args(workload(preset, preset.ddp_steps)),
    )
}

fn workload(preset: Preset, num_steps: usize) -> [String; 10] {
    let steps = num_steps.to_string();
    [
        "--preset",
        preset.name,
        "--steps",
        &steps,
        "--warmup",
        "0",
        "--threads",
        "1",
        "--seed",
        "1",
    ]
    .map(str::to_owned)
}

fn line(command: &mut Command) -> Result<Line, String> {
    json(&run(command
        .env("OMP_NUM_THREADS", "1")
        .env("GLOO_SOCKET_IFNAME", "lo"))?)
}

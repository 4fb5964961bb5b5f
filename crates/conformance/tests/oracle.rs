//! PyTorch as oracle: the same weights and data, the same losses and gradient norms.
//!
//! Like is compared with like: one rank with one rank, and PyTorch's DDP, ZeroRedundancyOptimizer,
//! `fully_shard` and `parallelize_module` with our strategies on as many ranks, one thread each. The
//! CNN's gradients jump where a rectifier turns on or off and rounding decides
//! which, so sums taken in another order differ by more than a mistake might. The peers make weights
//! by our formula; `crates/nn` tests that they are the same to the bit.

use std::process::{Command, ExitCode};

use libtest_mimic::{Arguments, Failed, Trial};
use serde::Deserialize;
use trainyard_conformance::programs::{find, json, python, repository, run};
use trainyard_conformance::training::assert_close;

/// Losses and gradient norms are within this of PyTorch's, relative. What PyTorch's own strategies
/// show among themselves is about a tenth of it.
const ALLOWED: f64 = 1e-5;

/// The same in bfloat16, where the two sides round products and sums in other places: what is
/// allowed between one rank and several, too.
const ALLOWED_IN_BF16: f64 = 2e-2;

/// Steps beside the warm-up; fewer of what takes seconds a step.
fn num_steps(preset: &str) -> usize {
    if preset == "small" { 5 } else { 17 }
}

const WARMUP: usize = 3;

/// A preset, a type, a strategy as both sides call it, and the number of ranks.
const CASES: [(&str, &str, &str, usize); 19] = [
    ("tiny", "fp32", "single", 1),
    ("tiny", "fp32", "ddp", 2),
    ("cnn", "fp32", "single", 1),
    ("cnn", "fp32", "ddp", 2),
    ("small", "fp32", "ddp", 2),
    ("tiny", "fp32", "zero1", 2),
    ("tiny", "fp32", "fsdp2", 2),
    ("tiny", "fp32", "fsdp2", 4),
    ("small", "fp32", "fsdp2", 2),
    ("tiny", "bf16", "fsdp2", 2),
    ("tiny", "fp32", "tp", 2),
    ("tiny", "bf16", "tp", 2),
    ("tiny", "fp32", "tp_sp", 2),
    ("tiny", "fp32", "tp_dp", 4),
    ("tiny", "fp32", "tp_fsdp2", 4),
    ("tiny", "fp32", "cp_ulysses", 2),
    ("tiny", "fp32", "pp_gpipe", 2),
    ("tiny", "fp32", "pp_1f1b", 2),
    ("tiny", "fp32", "pp_interleaved", 2),
];

#[derive(Deserialize)]
struct Line {
    losses: Vec<f64>,
    grad_norms: Vec<f64>,
}

fn main() -> ExitCode {
    // Skipped by name where there is no PyTorch to ask.
    let reason = python().err();
    let trials = CASES.map(|(preset, dtype, strategy, ranks)| {
        if let Some(reason) = &reason {
            println!("SKIPPED {preset}, {dtype}, {strategy} on {ranks} ranks: {reason}");
        }
        let name = format!("{preset}_{dtype}_{strategy}_on_{ranks}_ranks_trains_as_in_pytorch");
        Trial::test(name, move || agrees(preset, dtype, strategy, ranks))
            .with_ignored_flag(reason.is_some())
    });
    libtest_mimic::run(&Arguments::from_args(), trials.into()).exit_code()
}

fn agrees(preset: &str, dtype: &str, strategy: &str, ranks: usize) -> Result<(), Failed> {
    let (steps, warmup) = (num_steps(preset).to_string(), WARMUP.to_string());
    let workload = [
        ["--preset", preset],
        ["--dtype", dtype],
        ["--strategy", strategy],
        ["--steps", &steps],
        ["--warmup", &warmup],
        ["--threads", "1"],
    ];
    let workload = workload.as_flattened();

    let mut peer = Command::new(python()?);
    if ranks > 1 {
        peer.args(["-m", "torch.distributed.run", "--standalone"]);
        peer.arg(format!("--nproc-per-node={ranks}"));
    }
    peer.arg(repository("bench/peers/peer.py")).args(workload);
    let expected: Line = json(&run(peer.env("OMP_NUM_THREADS", "1"))?)?;

    let mut ours = Command::new(find("trainyard")?);
    ours.args([
        "run",
        "--standalone",
        "--nproc-per-node",
        &ranks.to_string(),
        "--",
    ]);
    ours.arg(find("trainyard-engine")?)
        .arg("bench-step")
        .args(workload);
    let found: Line = json(&run(ours.env("OMP_NUM_THREADS", "1"))?)?;

    assert_eq!(found.losses.len(), num_steps(preset) + WARMUP);
    let allowed = match dtype {
        "bf16" => ALLOWED_IN_BF16,
        _ => ALLOWED,
    };
    assert_close("loss", &found.losses, &expected.losses, allowed);
    let (found, expected) = (&found.grad_norms, &expected.grad_norms);
    assert_close("gradient norm", found, expected, allowed);
    Ok(())
}

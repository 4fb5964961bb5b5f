//! PyTorch as the oracle: with the same weights and data, losses and gradient norms are the same.
//!
//! One rank is compared with one rank, and PyTorch's DDP, ZeroRedundancyOptimizer, `fully_shard` and
//! `parallelize_module` with our strategies on as many ranks, one thread each. The peers initialize their weights by
//! our formula; `crates/nn` tests that the weights are equal to the bit. The CNN is compared like with like only: its
//! gradients jump where a ReLU switches, and rounding decides when, so that another order of summation can differ by
//! more than a mistake would.

use std::process::Command;

use libtest_mimic::{Failed, Trial};
use serde::Deserialize;
use trainyard_conformance::full_only;
use trainyard_conformance::programs::{find, json, python, repository, run};
use trainyard_conformance::training::assert_close;

/// Relative tolerance of losses and gradient norms. PyTorch's own strategies differ from each other by about a
/// tenth of it.
const ALLOWED: f64 = 1e-5;

/// The same in bfloat16, in which the two sides round at different points; also the tolerance between one rank and
/// several.
const ALLOWED_IN_BF16: f64 = 2e-2;

/// Steps after the warm-up; fewer for models whose step takes seconds.
fn num_steps(preset: &str) -> usize {
    if preset == "small" { 5 } else { 17 }
}

const WARMUP: usize = 3;

/// A preset, a type, a strategy as both sides call it, and the number of ranks.
type Row = (&'static str, &'static str, &'static str, usize);

/// Every strategy once, for every CI run.
const ROWS: [Row; 7] = [
    ("tiny", "fp32", "ddp", 2),
    ("cnn", "fp32", "ddp", 2),
    ("tiny", "fp32", "zero1", 2),
    ("tiny", "fp32", "fsdp2", 2),
    ("tiny", "fp32", "tp_sp", 2),
    ("tiny", "fp32", "cp_ulysses", 2),
    ("tiny", "fp32", "pp_interleaved", 2),
];

/// Combinations, larger models, other types and other numbers of ranks, for full CI runs.
const FULL_ROWS: [Row; 12] = [
    ("tiny", "fp32", "single", 1),
    ("cnn", "fp32", "single", 1),
    ("small", "fp32", "ddp", 2),
    ("tiny", "fp32", "fsdp2", 4),
    ("small", "fp32", "fsdp2", 2),
    ("tiny", "bf16", "fsdp2", 2),
    ("tiny", "fp32", "tp", 2),
    ("tiny", "bf16", "tp", 2),
    ("tiny", "fp32", "tp_dp", 4),
    ("tiny", "fp32", "tp_fsdp2", 4),
    ("tiny", "fp32", "pp_gpipe", 2),
    ("tiny", "fp32", "pp_1f1b", 2),
];

#[derive(Deserialize)]
struct Line {
    losses: Vec<f64>,
    grad_norms: Vec<f64>,
}

/// One test for each row. They are skipped where there is no PyTorch to compare with.
pub fn trials() -> Vec<Trial> {
    let missing = python().err();
    let trial = |(preset, dtype, strategy, ranks): Row| {
        if let Some(reason) = &missing {
            println!("SKIPPED {preset}, {dtype}, {strategy} on {ranks} ranks: {reason}");
        }
        let name =
            format!("oracle::{preset}_{dtype}_{strategy}_on_{ranks}_ranks_trains_as_in_pytorch");
        Trial::test(name, move || agrees(preset, dtype, strategy, ranks))
            .with_ignored_flag(missing.is_some())
    };
    let full = FULL_ROWS.into_iter().map(trial).map(full_only);
    ROWS.into_iter().map(trial).chain(full).collect()
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

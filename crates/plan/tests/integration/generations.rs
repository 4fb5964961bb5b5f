//! Constants of a software generation: fitted to some papers, and scored on another.

use trainyard_plan::{Calibration, Constants, NUM_CONSTANTS, Run, Software, fit};

use crate::papers::{Published, megascale, megatron_2022, zero_bubble};
use crate::runs::{share_within, summary};

/// What changed between 2021 and 2023 is how fast kernels are. The links and the host are those of the larger set of runs.
const OF_KERNELS: [&str; 7] = [
    "matmul",
    "matmul_area",
    "matmul_depth",
    "attention",
    "memory",
    "softmax",
    "loss_alone",
];

/// The constants of kernels, fitted to these runs; all others are those of 2021.
fn fit_kernels(runs: &[Run<'_>], of_2021: &Constants) -> Constants {
    let mut stds: [f64; NUM_CONSTANTS] = Constants::prior_stds();
    for (name, std) in Constants::names().iter().zip(&mut stds) {
        if !OF_KERNELS.contains(name) {
            *std *= 1e-3;
        }
    }
    fit(runs, of_2021, &stds)
}

/// Each paper is predicted with constants that were fitted to the other two, and the stored constants are those of a fit to all.
#[test]
fn a100_of_2023_is_predicted_from_other_papers() {
    // The largest mean error that is accepted: no other paper than Zero Bubble's has a loss on a single rank.
    let papers = [
        (megatron_2022(), 0.05),
        (zero_bubble(), 0.12),
        (megascale(), 0.06),
    ];
    let accelerator = papers[0].0[0].cluster.accelerator.clone();
    let of_2021 = Calibration::of(&accelerator, Software::MEGATRON_2021).constants;
    let runs_but = |held: Option<usize>| -> Vec<Run<'_>> {
        let others = papers
            .iter()
            .enumerate()
            .filter(|(index, _)| Some(*index) != held);
        let runs = others.flat_map(|(_, (runs, _))| runs);
        runs.map(Published::run).collect()
    };
    let mut all_errors = Vec::new();
    for (held, (runs, bound)) in papers.iter().enumerate() {
        let constants = fit_kernels(&runs_but(Some(held)), &of_2021);
        let errors: Vec<f64> = runs.iter().map(|run| run.run().error(&constants)).collect();
        let (mean, worst) = summary(&errors);
        let by_error =
            |a: &(&Published, &f64), b: &(&Published, &f64)| a.1.abs().total_cmp(&b.1.abs());
        let worst_run = runs.iter().zip(&errors).max_by(by_error);
        println!(
            "{}, held out: mean {:.1} %, worst {:.1} % ({}), {} runs",
            runs[0].paper,
            100.0 * mean,
            100.0 * worst,
            worst_run.map_or("", |(run, _)| &run.name),
            runs.len()
        );
        assert!(mean <= *bound, "{}: {mean}", runs[0].paper);
        all_errors.extend(errors);
    }
    let calibration = Calibration::of(&accelerator, Software::MEGATRON_2023);
    let held = share_within(&all_errors, calibration.spread);
    println!(
        "{:.0} % within a factor of {}",
        100.0 * held,
        1.0 + calibration.spread
    );
    assert!(held >= 0.9, "{held}");
    let fitted = fit_kernels(&runs_but(None), &of_2021);
    println!("{fitted:#?}");
    let stored = calibration.constants.to_array();
    let pairs = fitted.to_array().into_iter().zip(stored);
    for (name, (a, b)) in Constants::names().iter().zip(pairs) {
        assert!((a / b - 1.0).abs() < 0.01, "{name}: fitted {a}, stored {b}");
    }
}

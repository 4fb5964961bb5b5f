//! Predicted against measured step times, on runs that the constants were not fitted to.
//!
//! The runs are vTrain's ground truth: Megatron on A100, 1,440 runs on one node and 109 on 8 to 64 nodes. The tests
//! hold out all runs of one hidden size, or all runs of one `(tp, dp, pp)`, and fit the constants to the others. They
//! repeat this for every hidden size and every mesh, so constants are never fitted to a run that they are scored on.

use std::sync::LazyLock;

use crate::runs::{held_out, summary, vtrain};
use trainyard_plan::{Calibration, Cluster, Constants, Recompute, Run, Software, fit};

static ONE: LazyLock<Cluster> = LazyLock::new(|| "8xA100".parse().unwrap());
static MANY: LazyLock<Cluster> = LazyLock::new(|| "512xA100".parse().unwrap());

fn single() -> Option<Vec<Run<'static>>> {
    vtrain("vtrain_ground_truth_single.csv", Recompute::None, &ONE)
}

fn multi() -> Option<Vec<Run<'static>>> {
    vtrain("vtrain_ground_truth_multi.csv", Recompute::Full, &MANY)
}

fn fit_runs(runs: &[Run<'_>]) -> Constants {
    fit(runs, &Constants::prior(), &Constants::prior_stds())
}

fn hidden(run: &Run<'_>) -> usize {
    run.shape.hidden_size
}

fn mesh(run: &Run<'_>) -> (usize, usize, usize) {
    let degrees = &run.strategy.degrees;
    (degrees.tp, degrees.dp_shard, degrees.pp)
}

/// Prints the mean and worst error and the mean of each held-out key, and returns the mean.
fn report<K: std::fmt::Debug>(name: &str, errors: &[f64], means: &[(K, f64)]) -> f64 {
    let (mean, worst) = summary(errors);
    let count = errors.len();
    println!(
        "{name}: mean {:.2} %, worst {:.1} %, {count} runs",
        100.0 * mean,
        100.0 * worst
    );
    for (key, mean) in means {
        println!("    {key:?} held out: {:.2} %", 100.0 * mean);
    }
    mean
}

#[test]
fn step_times_on_one_node() {
    let Some(runs) = single() else { return };
    let constants = fit_runs(&runs);
    let errors: Vec<f64> = runs.iter().map(|run| run.error(&constants)).collect();
    report::<()>("one node, fitted to the same runs", &errors, &[]);
    let (errors, means) = held_out(&runs, &[], hidden);
    let by_hidden = report("one node, hidden size held out", &errors, &means);
    let (errors, means) = held_out(&runs, &[], mesh);
    let by_mesh = report("one node, mesh held out", &errors, &means);
    assert!(by_hidden <= 0.08 && by_mesh <= 0.08);
}

#[test]
fn step_times_on_many_nodes() {
    let Some(runs) = multi() else { return };
    let constants = fit_runs(&runs);
    let errors: Vec<f64> = runs.iter().map(|run| run.error(&constants)).collect();
    report::<()>("many nodes, fitted to the same runs", &errors, &[]);
    let (errors, means) = held_out(&runs, &[], hidden);
    let by_hidden = report("many nodes, hidden size held out", &errors, &means);
    let (errors, means) = held_out(&runs, &[], mesh);
    let by_mesh = report("many nodes, mesh held out", &errors, &means);
    assert!(by_hidden <= 0.12 && by_mesh <= 0.12);
}

/// Runs on one node measure the kernels, so including them must keep the prediction for many nodes accurate.
#[test]
fn runs_on_one_node_help_to_predict_many() {
    let (Some(runs), Some(extra)) = (multi(), single()) else {
        return;
    };
    let (errors, means) = held_out(&runs, &extra, hidden);
    let name = "many nodes, hidden size held out, fitted to runs on one node, too";
    assert!(report(name, &errors, &means) <= 0.12);
}

/// The data does not state whether the runs on one node used recomputation. If they had, matrix products would have
/// exceeded the accelerator's peak.
#[test]
fn single_node_runs_do_not_recompute() {
    let recomputed = vtrain("vtrain_ground_truth_single.csv", Recompute::Full, &ONE);
    let (Some(runs), Some(recomputed)) = (single(), recomputed) else {
        return;
    };
    let fit_quality = |runs: &[Run<'_>]| {
        let constants = fit_runs(runs);
        let errors: Vec<f64> = runs.iter().map(|run| run.error(&constants)).collect();
        (summary(&errors).0, constants.matmul)
    };
    let (saved_error, saved_share) = fit_quality(&runs);
    let (recomputed_error, recomputed_share) = fit_quality(&recomputed);
    println!(
        "no recomputation: error {:.2} %, matrix products at {saved_share:.2} of the peak; \
         full recomputation: error {:.2} %, {recomputed_share:.2}",
        100.0 * saved_error,
        100.0 * recomputed_error
    );
    assert!(saved_error < recomputed_error && saved_share < 0.9);
    assert!(
        recomputed_share > 0.99,
        "the fit must reach the upper bound"
    );
}

/// The constants in the source are those of a fit to these runs.
#[test]
fn the_constants_of_a100_are_fitted_to_these_runs() {
    let (Some(mut runs), Some(many)) = (single(), multi()) else {
        return;
    };
    runs.extend(many);
    let fitted = fit_runs(&runs);
    let stored = Calibration::of(&ONE.accelerator, Software::MEGATRON_2021).constants;
    println!("{fitted:#?}");
    for ((name, a), b) in Constants::names()
        .iter()
        .zip(fitted.to_array())
        .zip(stored.to_array())
    {
        assert!((a / b - 1.0).abs() < 0.01, "{name}: fitted {a}, stored {b}");
    }
}

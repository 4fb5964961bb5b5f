//! Predicted against measured step times, on runs that the constants were not fitted to.
//!
//! The runs are vTrain's ground truth: Megatron on A100, 1,440 on one machine and 109 on 8 to 64. What is
//! held out is held out whole: all runs of one hidden size, or all runs of one `(tp, dp, pp)`; constants are
//! fitted to the others, once for every hidden size and every mesh, and never to a run they are scored on.

mod runs;

use std::sync::LazyLock;

use runs::{held_out, summary, vtrain};
use trainyard_plan::{Calibration, Cluster, Constants, Recompute, Run, Software, fit};

static ONE: LazyLock<Cluster> = LazyLock::new(|| "8xA100".parse().unwrap());
static MANY: LazyLock<Cluster> = LazyLock::new(|| "512xA100".parse().unwrap());

fn single() -> Option<Vec<Run<'static>>> {
    vtrain("vtrain_ground_truth_single.csv", Recompute::None, &ONE)
}

fn multi() -> Option<Vec<Run<'static>>> {
    vtrain("vtrain_ground_truth_multi.csv", Recompute::Full, &MANY)
}

fn likely(runs: &[Run<'_>]) -> Constants {
    fit(runs, &Constants::likely(), &Constants::doubts())
}

fn hidden(run: &Run<'_>) -> usize {
    run.shape.hidden_size
}

fn mesh(run: &Run<'_>) -> (usize, usize, usize) {
    let degrees = &run.strategy.degrees;
    (degrees.tp, degrees.dp_shard, degrees.pp)
}

/// Prints mean and worst, what each key's runs came to, and returns the mean.
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
fn on_one_machine() {
    let Some(runs) = single() else { return };
    let constants = likely(&runs);
    let errors: Vec<f64> = runs.iter().map(|run| run.error(&constants)).collect();
    report::<()>("one machine, fitted to the same runs", &errors, &[]);
    let (errors, means) = held_out(&runs, &[], hidden);
    let by_hidden = report("one machine, hidden size held out", &errors, &means);
    let (errors, means) = held_out(&runs, &[], mesh);
    let by_mesh = report("one machine, mesh held out", &errors, &means);
    assert!(by_hidden <= 0.08 && by_mesh <= 0.08);
}

#[test]
fn on_many_machines() {
    let Some(runs) = multi() else { return };
    let constants = likely(&runs);
    let errors: Vec<f64> = runs.iter().map(|run| run.error(&constants)).collect();
    report::<()>("many machines, fitted to the same runs", &errors, &[]);
    let (errors, means) = held_out(&runs, &[], hidden);
    let by_hidden = report("many machines, hidden size held out", &errors, &means);
    let (errors, means) = held_out(&runs, &[], mesh);
    let by_mesh = report("many machines, mesh held out", &errors, &means);
    assert!(by_hidden <= 0.12 && by_mesh <= 0.12);
}

/// Runs on one machine tell about kernels, so they may help to predict runs on many.
#[test]
fn runs_on_one_machine_help_to_predict_many() {
    let (Some(runs), Some(beside)) = (multi(), single()) else {
        return;
    };
    let (errors, means) = held_out(&runs, &beside, hidden);
    let name = "many machines, hidden size held out, runs on one machine known";
    assert!(report(name, &errors, &means) <= 0.12);
}

/// Nothing says whether the runs on one machine computed blocks again. If they had, matrix products would
/// have run faster than the accelerator can.
#[test]
fn nothing_is_computed_again_on_one_machine() {
    let again = vtrain("vtrain_ground_truth_single.csv", Recompute::Full, &ONE);
    let (Some(runs), Some(again)) = (single(), again) else {
        return;
    };
    let far = |runs: &[Run<'_>]| {
        let constants = likely(runs);
        let errors: Vec<f64> = runs.iter().map(|run| run.error(&constants)).collect();
        (summary(&errors).0, constants.matmul)
    };
    let ((kept, kept_share), (computed, computed_share)) = (far(&runs), far(&again));
    println!(
        "kept: {:.2} %, products reach {kept_share:.2} of the peak; computed again: {:.2} %, {computed_share:.2}",
        100.0 * kept,
        100.0 * computed
    );
    assert!(kept < computed && kept_share < 0.9);
    assert!(computed_share > 0.99, "held at all there is");
}

/// What is in the source is what a fit to these runs gives.
#[test]
fn the_constants_of_a100_are_fitted_to_these_runs() {
    let (Some(mut runs), Some(many)) = (single(), multi()) else {
        return;
    };
    runs.extend(many);
    let fitted = likely(&runs);
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

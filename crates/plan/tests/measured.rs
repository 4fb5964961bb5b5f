//! Predicted against measured step times, on runs that the constants were not fitted to.

mod runs;

use runs::{held_out, summary, vtrain};
use trainyard_plan::{Cluster, Constants, Recompute, Run, fit};

fn show(name: &str, runs: &[Run<'_>], errors: &[f64]) {
    let (mean, worst) = summary(errors);
    println!(
        "{name}: mean {:.2} %, worst {:.1} %, {} runs",
        100.0 * mean,
        100.0 * worst,
        runs.len()
    );
}

fn hidden(run: &Run<'_>) -> usize {
    run.shape.hidden_size
}

fn mesh(run: &Run<'_>) -> (usize, usize, usize) {
    let degrees = &run.strategy.degrees;
    (degrees.tp, degrees.dp_shard, degrees.pp)
}

#[test]
fn single() {
    let cluster: Cluster = "8xA100".parse().unwrap();
    let Some(runs) = vtrain("vtrain_ground_truth_single.csv", Recompute::None, &cluster) else {
        return;
    };
    let t0 = std::time::Instant::now();
    let constants = fit(&runs, &Constants::likely(), &Constants::doubts());
    println!("{:?} {:?}", t0.elapsed(), constants);
    let inside: Vec<f64> = runs.iter().map(|run| run.error(&constants)).collect();
    show("fitted to the same runs", &runs, &inside);
    let (errors, means) = held_out(&runs, &[], hidden);
    show("hidden size held out", &runs, &errors);
    println!("  {means:?}");
    let (errors, _) = held_out(&runs, &[], mesh);
    show("mesh held out", &runs, &errors);
}

#[test]
fn multi() {
    let cluster: Cluster = "512xA100".parse().unwrap();
    let Some(runs) = vtrain("vtrain_ground_truth_multi.csv", Recompute::Full, &cluster) else {
        return;
    };
    let one: Cluster = "8xA100".parse().unwrap();
    let Some(beside) = vtrain("vtrain_ground_truth_single.csv", Recompute::None, &one) else {
        return;
    };
    let constants = fit(&runs, &Constants::likely(), &Constants::doubts());
    println!("{:?}", constants);
    let inside: Vec<f64> = runs.iter().map(|run| run.error(&constants)).collect();
    show("multi: fitted to the same runs", &runs, &inside);
    let (errors, means) = held_out(&runs, &[], hidden);
    show("multi: hidden size held out", &runs, &errors);
    println!("  {means:?}");
    let (errors, _) = held_out(&runs, &[], mesh);
    show("multi: mesh held out", &runs, &errors);
    let (errors, means) = held_out(&runs, &beside, hidden);
    show("multi: hidden size held out, with single", &runs, &errors);
    println!("  {means:?}");
}

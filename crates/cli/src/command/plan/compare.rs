//! `trainyard plan compare`: a plan beside the run it was made for.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use trainyard_plan::compare::{Measured, with_constants};
use trainyard_plan::report::{PlanFile, in_words, term};
use trainyard_plan::{Calibration, Constants, model_flops_utilization};

use super::{read, write};
use crate::failure::Failure;

/// Set a plan beside a measured run, and fit the constants to it
///
/// The run is the metrics.jsonl of a job, or CSV with the header step_seconds,peak_bytes.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    trainyard plan compare plan.json outputs/metrics.jsonl\n  \
    trainyard plan compare plan.json measured.csv --output cluster.toml")]
pub(super) struct Compare {
    /// What `trainyard plan --json` printed; its best plan is the one that ran
    #[arg(value_name = "PLAN.json")]
    plan: PathBuf,
    /// What was measured
    #[arg(value_name = "RUN")]
    run: PathBuf,
    /// Where to write a cluster file with the constants that explain the run
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

impl Compare {
    /// Compares, refits and tells.
    pub fn execute(self) -> Result<ExitCode, Failure> {
        let file = PlanFile::read(&read(&self.plan)?).map_err(Failure::new)?;
        let run = Measured::read(&read(&self.run)?).map_err(Failure::new)?;
        beside(&file, &run);
        let PlanFile { question, plan } = &file;
        let constants = run.refit(question, plan);
        refitted(&file, &constants)?;
        if let Some(path) = &self.output {
            let cluster = with_constants(&question.cluster, &constants).map_err(Failure::new)?;
            write(path, &cluster.to_toml())?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// Prediction and measurement, where the run has one.
fn beside(PlanFile { question, plan }: &PlanFile, run: &Measured) {
    let (strategy, time) = (&plan.strategy, &plan.time);
    let ranks = strategy.degrees.world_size() as f64;
    let tokens = (strategy.global_batch * strategy.seq_len) as f64;
    let peak = question.cluster.accelerator.peak.value * ranks;
    let mfu = model_flops_utilization(&question.shape, strategy, time.likely, peak);
    println!("{}\n{} measured steps\n", in_words(plan), run.num_steps);
    println!(
        "{:<22} {:>12} {:>12} {:>8}",
        "", "predicted", "measured", "off"
    );
    row("step, seconds", time.likely, Some(run.seconds));
    row("peak, bytes", plan.memory.total(), run.peak_bytes);
    row(
        "tokens/s/GPU",
        tokens / time.likely / ranks,
        run.tokens_per_second,
    );
    row("MFU", mfu, run.mfu);
    let is_inside = (time.low..=time.high).contains(&run.seconds);
    let word = if is_inside { "inside" } else { "outside" };
    println!(
        "\nThe measured step is {word} the range of {:.4} to {:.4} s.",
        time.low, time.high
    );
    if let Some(share) = run.data_share.filter(|share| *share > 0.0) {
        let waited = share * run.seconds;
        println!("It waited {waited:.4} s for data, which the planner takes to be free.");
    }
}

/// Terms and constants, before and after the fit.
fn refitted(PlanFile { question, plan }: &PlanFile, constants: &Constants) -> Result<(), Failure> {
    let mut after = question.clone();
    after.calibration = Calibration {
        constants: *constants,
        ..question.calibration.clone()
    };
    let again = after.price(&plan.strategy).map_err(Failure::new)?;
    println!(
        "\n{:<42} {:>11} {:>11}",
        "term, seconds", "before", "refitted"
    );
    let terms = plan.time.terms().into_iter().zip(again.time.terms());
    for ((name, before), (_, after)) in terms.filter(|((_, s), _)| *s > 0.0) {
        println!("{:<42} {before:>11.5} {after:>11.5}", term(name));
    }
    let (before, after) = (plan.time.likely, again.time.likely);
    println!("{:<42} {before:>11.5} {after:>11.5}", "step");
    println!(
        "\n{:<42} {:>11} {:>11}",
        "constants that moved", "before", "refitted"
    );
    let values = question.calibration.constants.to_array();
    let pairs = Constants::names().into_iter().zip(values);
    for ((name, before), after) in pairs.zip(constants.to_array()) {
        if (after / before).ln().abs() > 0.005 {
            println!("{name:<42} {before:>11.4e} {after:>11.4e}");
        }
    }
    Ok(())
}

fn row(name: &str, predicted: f64, measured: Option<f64>) {
    let number = |value: f64| match value.abs() >= 1e6 {
        true => format!("{value:.4e}"),
        false => format!("{value:.4}"),
    };
    let (seen, off) = match measured {
        Some(value) => (
            number(value),
            format!("{:+.1} %", 100.0 * (predicted / value - 1.0)),
        ),
        None => ("-".to_owned(), "-".to_owned()),
    };
    println!("{name:<22} {:>12} {seen:>12} {off:>8}", number(predicted));
}

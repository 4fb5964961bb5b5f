//! `trainyard plan compare`: compares a plan with the run it was made for.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use trainyard_plan_report::compare::{Comparison, Measured, Row, TraceBreakdown, with_constants};
use trainyard_plan_report::{PlanFile, describe};
use trainyard_trace::{counted, read_all};

use super::{read, write};
use crate::failure::Failure;

/// Compare a plan with a measured run term by term, and fit the constants to the run
///
/// The run is a job's output directory (with its metrics.jsonl, and traces if it was profiled), a metrics.jsonl, a
/// directory of traces, or CSV with the header step_seconds,peak_bytes. Only traces contain the terms.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    trainyard plan compare plan.json outputs\n  \
    trainyard plan compare plan.json outputs/metrics.jsonl --trace outputs/profile_traces --json\n  \
    trainyard plan compare plan.json measured.csv --output cluster.toml")]
pub(super) struct Compare {
    /// The output of `trainyard plan --json`
    #[arg(value_name = "PLAN.json")]
    plan: PathBuf,
    /// The measured run
    #[arg(value_name = "RUN")]
    run: PathBuf,
    /// Number of the plan that ran, from 1
    #[arg(long, value_name = "N", default_value_t = 1)]
    number: usize,
    /// The run's traces (one file per rank) or their directory, if they are not in the run's directory
    #[arg(long, value_name = "FILE")]
    trace: Vec<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Where to write a cluster file with the fitted constants
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

impl Compare {
    /// Compares, fits the constants and prints the result.
    pub fn execute(self) -> Result<ExitCode, Failure> {
        let file = PlanFile::read_number(&read(&self.plan)?, self.number).map_err(Failure::new)?;
        let (measured, traced) = self.read_run(&file)?;
        let found = Comparison::of(&file, &measured, traced.as_ref()).map_err(Failure::new)?;
        if self.json {
            println!("{:#}", found.to_json())
        } else {
            print_comparison(&file, &measured, traced.as_ref(), &found)
        }
        if let Some(path) = &self.output {
            let cluster = with_constants(&file.request.cluster, &found.constants);
            write(path, &cluster.map_err(Failure::new)?.to_toml())?;
        }
        Ok(ExitCode::SUCCESS)
    }

    /// Reads the run's metrics and traces.
    fn read_run(&self, file: &PlanFile) -> Result<(Measured, Option<TraceBreakdown>), Failure> {
        let files = RunFiles::find(&self.run, &self.trace);
        let traced = if files.traces.is_empty() {
            None
        } else {
            let ranks = read_all(&files.traces).map_err(Failure::new)?;
            let degrees = &file.plan.strategy.degrees;
            Some(TraceBreakdown::of(&ranks, degrees, &file.request.cluster).map_err(Failure::new)?)
        };
        let measured = match (&files.metrics, &traced) {
            (Some(path), _) => Measured::read(&read(path)?).map_err(Failure::new)?,
            (None, Some(traced)) => traced.measured(),
            (None, None) => {
                let run = self.run.display();
                let hint = "a job writes metrics.jsonl, and traces with `--profiling.enable_profiling true`";
                return Err(Failure::new(format!("{run}: no metrics or traces found")).hint(hint));
            }
        };
        Ok((measured, traced))
    }
}

/// The files of a run.
struct RunFiles {
    metrics: Option<PathBuf>,
    traces: Vec<PathBuf>,
}

impl RunFiles {
    /// Finds the metrics and the trace directory in a job's output directory; any other path is a metrics file.
    fn find(run: &Path, traces: &[PathBuf]) -> RunFiles {
        let mut traces = traces.to_vec();
        if !run.is_dir() {
            let metrics = Some(run.to_owned());
            return RunFiles { metrics, traces };
        }
        if traces.is_empty() {
            let entries = std::fs::read_dir(run).into_iter().flatten().flatten();
            let mut dirs: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
            dirs.push(run.to_owned());
            let is_trace = |dir: &PathBuf| dir.join("rank0.json").is_file();
            traces.extend(dirs.into_iter().find(is_trace));
        }
        let metrics = run.join("metrics.jsonl");
        let metrics = metrics.is_file().then_some(metrics);
        RunFiles { metrics, traces }
    }
}

fn print_comparison(
    file: &PlanFile,
    measured: &Measured,
    traced: Option<&TraceBreakdown>,
    found: &Comparison,
) {
    let time = &file.plan.time;
    println!("{}", describe(&file.plan));
    table(
        &format!("{} measured steps", measured.num_steps),
        &found.summary,
    );
    let is_inside = (time.low..=time.high).contains(&measured.seconds);
    let position = if is_inside { "inside" } else { "outside" };
    println!(
        "\nThe measured step time is {position} the predicted range of {:.4} to {:.4} s.",
        time.low, time.high
    );
    let heading = match traced {
        Some(traced) => format!(
            "seconds on rank {}, {}",
            traced.rank,
            counted(traced.num_steps as u64, "step")
        ),
        None => "seconds".to_owned(),
    };
    table(&heading, &found.terms);
    match traced {
        Some(_) if !found.collectives.is_empty() => {
            table("seconds per collective", &found.collectives)
        }
        Some(_) => {}
        None => println!(
            "\nOnly traces contain the measured terms: run with `--profiling.enable_profiling true`."
        ),
    }
    if let (None, Some(share)) = (traced, measured.data_share.filter(|share| *share > 0.0)) {
        let waited = share * measured.seconds;
        println!(
            "The run waited {waited:.4} s per step for data, which the planner assumes to be free."
        );
    }
    println!(
        "\n{:<45} {:>11} {:>11}",
        "changed constants", "before", "refitted"
    );
    for (name, before, after) in found.moved() {
        println!("{name:<45} {before:>11.4e} {after:>11.4e}");
    }
}

fn table(heading: &str, rows: &[Row]) {
    println!(
        "\n{heading:<45} {:>11} {:>12} {:>11} {:>7} {:>11}",
        "predicted", "measured", "difference", "ratio", "refitted"
    );
    for row in rows {
        let optional = |value: Option<f64>| value.map_or("-".to_owned(), number);
        let measured = row.measured.map_or("not measured".to_owned(), number);
        let ratio = row
            .ratio()
            .map_or("-".to_owned(), |ratio| format!("{ratio:.2}"));
        println!(
            "{:<45} {:>11} {measured:>12} {:>11} {ratio:>7} {:>11}",
            row.name,
            number(row.predicted),
            optional(row.difference()),
            optional(row.refitted),
        );
    }
}

fn number(value: f64) -> String {
    match value.abs() {
        size if size >= 1e6 => format!("{value:.3e}"),
        size if size >= 1.0 || size == 0.0 => format!("{value:.3}"),
        _ => format!("{value:.6}"),
    }
}

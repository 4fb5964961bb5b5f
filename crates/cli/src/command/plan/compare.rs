//! `trainyard plan compare`: a plan beside the run it was made for.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use trainyard_plan::compare::{Comparison, Measured, Row, Traced, with_constants};
use trainyard_plan::report::{PlanFile, in_words};
use trainyard_trace::read_all;

use super::{read, write};
use crate::failure::Failure;

/// Set a plan beside a measured run term by term, and fit the constants to it
///
/// The run is the folder of a job (its metrics.jsonl, and its traces if it was profiled), a metrics.jsonl,
/// a folder of traces, or CSV with the header step_seconds,peak_bytes. Terms are in traces alone.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    trainyard plan compare plan.json outputs\n  \
    trainyard plan compare plan.json outputs/metrics.jsonl --trace outputs/profile_traces --json\n  \
    trainyard plan compare plan.json measured.csv --output cluster.toml")]
pub(super) struct Compare {
    /// What `trainyard plan --json` printed
    #[arg(value_name = "PLAN.json")]
    plan: PathBuf,
    /// What was measured
    #[arg(value_name = "RUN")]
    run: PathBuf,
    /// Which of its plans ran, from 1
    #[arg(long, value_name = "N", default_value_t = 1)]
    place: usize,
    /// The run's traces, a file per rank or their folder, where they are not in the run's folder
    #[arg(long, value_name = "FILE")]
    trace: Vec<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Where to write a cluster file with the constants that explain the run
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

impl Compare {
    /// Compares, refits and tells.
    pub fn execute(self) -> Result<ExitCode, Failure> {
        let file = PlanFile::read_place(&read(&self.plan)?, self.place).map_err(Failure::new)?;
        let (measured, traced) = self.seen(&file)?;
        let found = Comparison::of(&file, &measured, traced.as_ref()).map_err(Failure::new)?;
        match self.json {
            true => println!("{:#}", found.to_json()),
            false => tell(&file, &measured, traced.as_ref(), &found),
        }
        if let Some(path) = &self.output {
            let cluster = with_constants(&file.question.cluster, &found.constants);
            write(path, &cluster.map_err(Failure::new)?.to_toml())?;
        }
        Ok(ExitCode::SUCCESS)
    }

    /// What the run left behind.
    fn seen(&self, file: &PlanFile) -> Result<(Measured, Option<Traced>), Failure> {
        let left = Left::find(&self.run, &self.trace);
        let traced = match left.traces.is_empty() {
            true => None,
            false => {
                let ranks = read_all(&left.traces).map_err(Failure::new)?;
                let degrees = &file.plan.strategy.degrees;
                Some(Traced::of(&ranks, degrees, &file.question.cluster).map_err(Failure::new)?)
            }
        };
        let measured = match (&left.metrics, &traced) {
            (Some(path), _) => Measured::read(&read(path)?).map_err(Failure::new)?,
            (None, Some(traced)) => traced.measured(),
            (None, None) => {
                let run = self.run.display();
                let hint = "a job writes metrics.jsonl, and traces with `--profiling.enable_profiling true`";
                return Err(Failure::new(format!("{run}: no run in it")).hint(hint));
            }
        };
        Ok((measured, traced))
    }
}

/// The files of a run.
struct Left {
    metrics: Option<PathBuf>,
    traces: Vec<PathBuf>,
}

impl Left {
    /// In a job's folder its metrics, and the folder that has a file per rank; any other path is what it is.
    fn find(run: &Path, traces: &[PathBuf]) -> Left {
        let mut traces = traces.to_vec();
        if !run.is_dir() {
            let metrics = Some(run.to_owned());
            return Left { metrics, traces };
        }
        if traces.is_empty() {
            let inside = std::fs::read_dir(run).into_iter().flatten().flatten();
            let mut folders: Vec<PathBuf> = inside.map(|entry| entry.path()).collect();
            folders.push(run.to_owned());
            let is_trace = |folder: &PathBuf| folder.join("rank0.json").is_file();
            traces.extend(folders.into_iter().find(is_trace));
        }
        let metrics = run.join("metrics.jsonl");
        let metrics = metrics.is_file().then_some(metrics);
        Left { metrics, traces }
    }
}

fn tell(file: &PlanFile, measured: &Measured, traced: Option<&Traced>, found: &Comparison) {
    let time = &file.plan.time;
    println!("{}", in_words(&file.plan));
    table(
        &format!("{} measured steps", measured.num_steps),
        &found.whole,
    );
    let is_inside = (time.low..=time.high).contains(&measured.seconds);
    let word = if is_inside { "inside" } else { "outside" };
    println!(
        "\nThe measured step is {word} the range of {:.4} to {:.4} s.",
        time.low, time.high
    );
    let heading = match traced {
        Some(traced) => format!(
            "seconds of rank {}, {} steps",
            traced.rank, traced.num_steps
        ),
        None => "seconds".to_owned(),
    };
    table(&heading, &found.terms);
    match traced {
        Some(_) if !found.wires.is_empty() => table("seconds of a collective", &found.wires),
        Some(_) => {}
        None => println!("\nTerms are in traces: run with `--profiling.enable_profiling true`."),
    }
    if let (None, Some(share)) = (traced, measured.data_share.filter(|share| *share > 0.0)) {
        let waited = share * measured.seconds;
        println!("It waited {waited:.4} s for data, which the planner takes to be free.");
    }
    println!(
        "\n{:<45} {:>11} {:>11}",
        "constants that moved", "before", "refitted"
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

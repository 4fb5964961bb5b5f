//! `trainyard plan` for a model that no formula describes: dry runs of every layout, priced for a cluster.

use std::collections::BTreeMap;
use std::io::{IsTerminal, stderr};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use trainyard_config::Offload;
use trainyard_plan::any_model::{
    AnyModelRequest, Candidate, Layout, Outcome, RankRun, best_of_layout, is_chosen, layouts,
};
use trainyard_plan::{Calibration, Cluster, Overheads, Software};
use trainyard_plan_report::{AnyModelReport, Style};

use crate::child;
use crate::configs::Configs;
use crate::error::{EngineError, Result};

/// A config with `parallelism = "auto"` asks for a plan, and this is how it is made.
const NOT_AUTO: &str = "--parallelism.auto=false";

/// Find the fastest way to train a model on a cluster, by dry runs of its training code
#[derive(Debug, clap::Args)]
#[command(
    override_usage = "trainyard plan --model CONFIG.toml --cluster CLUSTER --global-batch B [--SECTION.KEY VALUE]...",
    after_help = "Example:\n  \
    trainyard plan --model configs/cnn.toml --cluster 8xH100 --global-batch 512"
)]
pub struct Arguments {
    /// Path of the config file (TOML)
    #[arg(long, value_name = "CONFIG.toml")]
    model: PathBuf,
    /// The cluster: a short form such as 64xH100, or a cluster TOML
    #[arg(long, value_name = "CLUSTER", value_parser = Cluster::named)]
    cluster: Cluster,
    /// Global batch size: samples in a step, over all ranks
    #[arg(long, value_name = "B")]
    global_batch: NonZeroUsize,
    /// Sequence length: tokens of a sample, if samples are sequences; the config's by default
    #[arg(long, value_name = "S")]
    seq_len: Option<NonZeroUsize>,
    /// Number of plans to show
    #[arg(long, value_name = "N", default_value_t = 5)]
    top: usize,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs the search and prints the report. Exits with 1 if nothing fits.
pub fn execute(arguments: Arguments, configs: &Configs) -> Result<ExitCode> {
    check(&arguments, configs)?;
    let cluster = &arguments.cluster;
    let request = AnyModelRequest {
        calibration: Calibration::of_cluster(cluster, Software::MODERN),
        cluster: cluster.clone(),
        overheads: Overheads::default(),
        global_batch: arguments.global_batch.get(),
    };
    let mut overrides = configs.overrides.clone();
    let seq_len = arguments.seq_len.iter();
    overrides.extend(seq_len.map(|seq_len| format!("--training.seq_len={seq_len}")));
    let dry_runs = DryRuns {
        model: &arguments.model,
        world_size: cluster.world_size(),
        overrides: &overrides,
    };
    let outcomes = search(&request, &dry_runs)?;
    let model = arguments.model.display().to_string();
    let report = AnyModelReport::of(request, (program(), model, overrides), outcomes);
    if arguments.json {
        println!("{:#}", report.to_json(arguments.top))
    } else {
        print!("{}", report.to_text(arguments.top, Style::for_stdout()))
    }
    Ok(match report.best() {
        Some(_) => ExitCode::SUCCESS,
        None => ExitCode::FAILURE,
    })
}

/// Rejects what would otherwise be a reason against every layout, or what the planner chooses itself.
fn check(arguments: &Arguments, configs: &Configs) -> Result<()> {
    for argument in &configs.overrides {
        let key = argument.split('=').next().unwrap_or_default();
        let key = key.trim_start_matches("--").replace('-', "_");
        if is_chosen(&key) {
            return Err(EngineError::Plan(format!(
                "{key} is what the planner chooses: leave it out"
            )));
        }
    }
    let planned = Configs {
        overrides: [configs.overrides.clone(), vec![NOT_AUTO.to_owned()]].concat(),
        registry: configs.registry.clone(),
    };
    let parallelism = &planned.load(&arguments.model)?.parallelism;
    let fixed = [
        ("offload", parallelism.offload != Offload::None),
        (
            "pipeline_parallel_split_points",
            parallelism.pipeline_parallel_split_points.is_some(),
        ),
        (
            "pipeline_parallel_schedule_csv",
            parallelism.pipeline_parallel_schedule_csv.is_some(),
        ),
    ];
    match fixed.iter().find(|(_, is_set)| *is_set) {
        Some((key, _)) => Err(EngineError::Plan(format!(
            "parallelism.{key} fits few layouts and is not priced: remove it from {} to plan",
            arguments.model.display()
        ))),
        None => Ok(()),
    }
}

/// The command that trains: `trainyard`, whose engine this is, or a program of the user's own.
fn program() -> String {
    let own = std::env::args().next().unwrap_or_default();
    if own.ends_with("trainyard-engine") {
        "trainyard".to_owned()
    } else {
        own
    }
}

/// Searches all layouts, as many at once as there are cores.
fn search(request: &AnyModelRequest, dry_runs: &DryRuns<'_>) -> Result<Vec<(Layout, Outcome)>> {
    let all = layouts(&request.cluster);
    let next = AtomicUsize::new(0);
    let work = || {
        let mut found = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(&layout) = all.get(index) else {
                return Ok(found);
            };
            let run = |candidate: &Candidate, rank| dry_runs.run(candidate, rank);
            let outcome = best_of_layout(request, layout, run).inspect_err(|_| {
                next.store(all.len(), Ordering::Relaxed);
            });
            found.push((index, outcome?));
            show_progress(index + 1, all.len());
        }
    };
    let num_threads = thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let found: Result<Vec<Vec<(usize, Outcome)>>> = thread::scope(|scope| {
        let threads: Vec<_> = (0..num_threads).map(|_| scope.spawn(work)).collect();
        let join = |thread: thread::ScopedJoinHandle<'_, Result<_>>| {
            thread
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        threads.into_iter().map(join).collect()
    });
    // The order of layouts, not of threads.
    let found: BTreeMap<usize, Outcome> = found?.into_iter().flatten().collect();
    Ok(all.into_iter().zip(found.into_values()).collect())
}

fn show_progress(done: usize, total: usize) {
    if stderr().is_terminal() {
        let end = if done == total { "\r\x1b[K" } else { "" };
        eprint!("\rdry run of layout {done} of {total}{end}");
    }
}

/// Dry runs of a config by this program.
struct DryRuns<'a> {
    model: &'a PathBuf,
    world_size: usize,
    overrides: &'a [String],
}

impl DryRuns<'_> {
    /// Counts the work of a rank; the inner error says why the model cannot be trained that way.
    fn run(&self, candidate: &Candidate, rank: usize) -> Result<Result<RankRun, String>> {
        let printed = child::ask(|command| {
            command
                .arg("dry-run")
                .arg(self.model)
                .args(["--world", &self.world_size.to_string()])
                .args(["--rank", &rank.to_string(), "--json", "--operators"])
                .args(self.overrides)
                .args(candidate.overrides())
                .arg(NOT_AUTO)
                .env("RUST_LOG", "error")
        })?;
        let parse = |json: Vec<u8>| {
            serde_json::from_slice(&json).map_err(|error| EngineError::Unreadable {
                what: format!("the dry run of rank {rank}"),
                reason: error.to_string(),
            })
        };
        printed
            .map(parse)
            .map_or_else(|why| Ok(Err(why)), |run| run.map(Ok))
    }
}

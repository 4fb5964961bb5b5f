//! `trainyard verify`: compares a parallel strategy on N ranks with one rank.
//!
//! The same job runs four times on this host: on one rank and on N, in float64 and in the dtypes of the
//! config. In float64 rounding errors are too small to hide a mistake.

use std::ffi::OsString;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use tempfile::TempDir;
use trainyard_config::{
    Config, Dtype, GradientCompression, LocalUpdateMethod, LocalUpdatesSection, OptimizerName,
    ParameterCompression, Staleness,
};
use trainyard_launcher::Console;
use trainyard_trace::counted;
use trainyard_train::TrainError;

use crate::configs::Configs;
use crate::error::{EngineError, Result};
use crate::ranks::{run_locally, run_served_locally};
use crate::served::{Part, workers};
use crate::verify::compare::{Comparison, Tolerance, compare, compare_served};
use crate::verify::rank::{self, InjectedFault};
use crate::verify::served;

/// Verify that a parallel strategy computes the same as one rank
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Path of the config file (TOML)
    config: PathBuf,
    /// Number of local ranks
    #[arg(long)]
    nproc: usize,
    /// The ranks of a worker of parameter servers
    #[arg(long, default_value = "1", requires = "servers")]
    nproc_per_worker: NonZero<usize>,
    /// Compare parameter servers, with the ranks as their workers
    #[arg(long, conflicts_with = "inject_fault")]
    servers: Option<usize>,
    /// Steps to compare
    #[arg(long, default_value_t = 5)]
    steps: u64,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Verify a scaled-down version of a large config
    #[arg(long)]
    shrink: bool,
    /// Inject a fault into the strategy, to test that `verify` detects it
    #[arg(long, hide = true)]
    inject_fault: Option<InjectedFault>,
}

/// Arguments of one rank of `verify`.
#[derive(Debug, clap::Args)]
pub struct RankArguments {
    /// The complete config to run
    config: PathBuf,
    /// Directory for the results
    #[arg(long)]
    out: PathBuf,
    /// Steps to run
    #[arg(long)]
    steps: u64,
    /// The fault to inject
    #[arg(long)]
    inject_fault: Option<InjectedFault>,
}

/// Runs the job on one rank and on N, compares the results and prints a table.
pub fn execute(arguments: Arguments, configs: &Configs) -> Result<ExitCode> {
    let mut config = Config::clone(&*configs.load(&arguments.config)?);
    if arguments.shrink {
        config = config.shrink();
    }
    config.validation.enable = false;
    config.checkpoint.enable = false;
    let report = match arguments.servers {
        Some(num_servers) => verify_served(&arguments, config, num_servers)?,
        None => verify_ranks(&arguments, config)?,
    };
    Ok(report.print(&arguments))
}

/// The comparisons of a verification.
struct Report {
    /// What is compared with one rank.
    strategy: String,
    comparisons: Vec<Comparison>,
}

impl Report {
    fn print(&self, arguments: &Arguments) -> ExitCode {
        let passed = self.comparisons.iter().all(Comparison::passed);
        if arguments.json {
            let report = serde_json::json!({
                "mesh": self.strategy,
                "nproc": arguments.nproc,
                "steps": arguments.steps,
                "passed": passed,
                "comparisons": self.comparisons,
            });
            let report = serde_json::to_string_pretty(&report).unwrap_or_default();
            println!("{report}");
        } else {
            println!(
                "{} on {} compared with one rank, {}\n",
                self.strategy,
                counted(arguments.nproc as u64, "rank"),
                counted(arguments.steps, "step")
            );
            for comparison in &self.comparisons {
                println!("{comparison}");
            }
            println!("{}", if passed { "PASS" } else { "FAIL" });
        }
        if passed {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        }
    }
}

fn temporary_folder() -> Result<TempDir> {
    tempfile::tempdir().map_err(|source| EngineError::Io {
        path: std::env::temp_dir(),
        source,
    })
}

/// Compares ranks that exchange gradients with one rank.
fn verify_ranks(arguments: &Arguments, mut config: Config) -> Result<Report> {
    let mesh = config.mesh(arguments.nproc)?;
    let ranks = mesh.size_of(trainyard_train::data_axes());
    // The reference must train on the same global batch.
    config.training.global_batch_size = Some(config.batching(ranks)?.global);
    // The few steps of a verification shall compress.
    config.parallelism.power_sgd_start_step = 0;
    if config.local_updates.method != LocalUpdateMethod::None {
        // Replicas are joined after the last step.
        config.training.steps = arguments.steps;
    }
    let folder = temporary_folder()?;
    let mut comparisons = Vec::new();
    for (config, tolerance) in [
        in_fp64(&config),
        (
            config.clone(),
            Tolerance::of(config.training.compute_dtype(), &config),
        ),
    ] {
        let name = tolerance.name;
        if comparisons.iter().any(|c: &Comparison| c.types == name) {
            continue;
        }
        if !arguments.json {
            eprintln!(
                "{name}: running on 1 rank, then on {} ranks ...",
                arguments.nproc
            );
        }
        let reference = folder.path().join(format!("{name}-1"));
        let strategy = folder.path().join(format!("{name}-{}", arguments.nproc));
        run(&config.on_one_rank(), 1, &reference, arguments.steps, None)?;
        run(
            &config,
            arguments.nproc,
            &strategy,
            arguments.steps,
            arguments.inject_fault,
        )?;
        comparisons.push(compare(&reference, &strategy, arguments.nproc, tolerance)?);
    }
    Ok(Report {
        strategy: mesh.to_string(),
        comparisons,
    })
}

/// Compares parameter servers and their workers with one rank.
fn verify_served(arguments: &Arguments, mut config: Config, num_servers: usize) -> Result<Report> {
    let steps = arguments.steps;
    let workers = workers(arguments.nproc, arguments.nproc_per_worker)?;
    let global_batch = config.global_batch_of(workers).map_err(TrainError::from)?;
    config.training.global_batch_size = Some(global_batch);
    if config.has_local_updates() {
        // The last step is an outer step.
        config.training.steps = steps;
        config.lr_scheduler.warmup_steps = config.lr_scheduler.warmup_steps.min(steps);
    }
    // Pieces by measured speed have no closed form.
    config.parameter_server.balance_batches = false;
    let folder = temporary_folder()?;
    let mut comparisons = Vec::new();
    for (config, tolerance) in served_configs(&config) {
        let name = tolerance.name;
        if !arguments.json {
            eprintln!(
                "{name}: running on 1 rank, then on parameter servers ({num_servers}) and workers ({}) ...",
                workers.num
            );
        }
        let reference = folder.path().join(format!("{name}-1"));
        let strategy = folder.path().join(format!("{name}-served"));
        run(&config.on_one_rank(), 1, &reference, steps, None)?;
        let args = rank_arguments(&config, &strategy, steps, None)?;
        run_served_locally(num_servers, workers, &args)?;
        comparisons.push(compare_served(
            &reference,
            &strategy,
            num_servers,
            tolerance,
        )?);
    }
    Ok(Report {
        strategy: format!("parameter servers ({num_servers}) with workers"),
        comparisons,
    })
}

/// What is compared: in float64 without staleness, and as the config says. Replicas with steps of their own equal one rank only in
/// the first.
fn served_configs(config: &Config) -> Vec<(Config, Tolerance)> {
    let (mut exact, tolerance) = in_fp64(config);
    exact.parameter_server.staleness = Staleness::Bounded(0);
    let mut configs = vec![(exact, tolerance)];
    if !config.has_local_updates() {
        let is_synchronous = config.parameter_server.staleness == Staleness::Bounded(0);
        let tolerance = if is_synchronous {
            Tolerance::of(config.training.compute_dtype(), config)
        } else {
            Tolerance::STALE
        };
        configs.push((config.clone(), tolerance));
    }
    configs
}

/// Trains on this rank and writes the results to `out`.
pub fn execute_rank(arguments: RankArguments, configs: &Configs) -> Result<ExitCode> {
    let spec = configs.load_plain(&arguments.config)?;
    match Part::from_environment(&spec)? {
        Some(part) => served::run(&spec, &part, arguments.steps, &arguments.out)?,
        None => rank::run(
            &spec,
            arguments.steps,
            &arguments.out,
            arguments.inject_fault,
        )?,
    }
    Ok(ExitCode::SUCCESS)
}

fn run(
    config: &Config,
    nproc: usize,
    out: &Path,
    steps: u64,
    inject_fault: Option<InjectedFault>,
) -> Result<()> {
    let args = rank_arguments(config, out, steps, inject_fault)?;
    run_locally(nproc, &args, Console::Silent)
}

/// Writes the config of a run to its folder, and returns the arguments of its ranks.
fn rank_arguments(
    config: &Config,
    out: &Path,
    steps: u64,
    inject_fault: Option<InjectedFault>,
) -> Result<Vec<OsString>> {
    let io = |source| EngineError::Io {
        path: out.to_owned(),
        source,
    };
    std::fs::create_dir_all(out).map_err(io)?;
    let file = out.join("config.toml");
    std::fs::write(&file, config.to_toml()?).map_err(io)?;
    let mut args: Vec<OsString> = vec![
        "verify-rank".into(),
        file.into(),
        "--out".into(),
        out.into(),
    ];
    args.extend(["--steps".into(), steps.to_string().into()]);
    if let Some(inject_fault) = inject_fault {
        args.extend(["--inject-fault".into(), inject_fault.to_string().into()]);
    }
    Ok(args)
}

/// The job in float64, in which it equals one rank. Replicas that take steps of their own do if they take one step of SGD
/// each between two averages.
fn in_fp64(config: &Config) -> (Config, Tolerance) {
    let mut config = config.clone();
    config.training.dtype = Dtype::Float64;
    config.training.mixed_precision_param = None;
    config.training.mixed_precision_reduce = None;
    config.parallelism.gradient_compression = GradientCompression::None;
    config.parallelism.parameter_compression = ParameterCompression::None;
    if config.local_updates.method == LocalUpdateMethod::None {
        return (config, Tolerance::FP64);
    }
    config.local_updates = LocalUpdatesSection {
        method: LocalUpdateMethod::LocalSgd,
        sync_steps: 1,
        ..LocalUpdatesSection::default()
    };
    config.optimizer.name = OptimizerName::Sgd.into();
    config.optimizer.momentum = 0.0;
    config.training.max_norm = 0.0;
    (config, Tolerance::FP64_REPLICAS)
}

//! `trainyard verify`: the config's strategy on N ranks against one rank.
//!
//! The same job runs four times on this machine: on one rank and on N, in fp64 and in the config's
//! own types. Equality is proven in fp64, where rounding cannot hide a mistake.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use trainyard_config::{Config, Dtype, GradientCompression};
use trainyard_elastic::Console;

use crate::error::{EngineError, Result};
use crate::ranks::run_locally;
use crate::verify::compare::{Comparison, Tolerance, compare};
use crate::verify::rank::{self, Sabotage};

/// Arguments of `verify`.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// The config file.
    config: PathBuf,
    /// Number of ranks to start here.
    #[arg(long)]
    nproc: usize,
    /// Steps to compare.
    #[arg(long, default_value_t = 5)]
    steps: u64,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Verify a scaled-down copy of a big config.
    #[arg(long)]
    shrink: bool,
    /// Break the strategy on purpose, to see that it is noticed.
    #[arg(long, hide = true)]
    sabotage: Option<Sabotage>,
}

/// Arguments of one rank.
#[derive(Debug, clap::Args)]
pub struct RankArguments {
    /// The config to run, complete.
    config: PathBuf,
    /// Where results go.
    #[arg(long)]
    out: PathBuf,
    /// Steps to run.
    #[arg(long)]
    steps: u64,
    /// What to break.
    #[arg(long)]
    sabotage: Option<Sabotage>,
}

/// Runs the job each way, compares, prints the table.
pub fn execute(arguments: Arguments, overrides: &[String]) -> Result<ExitCode> {
    let mut config = Config::load(&arguments.config, overrides)?;
    if arguments.shrink {
        config = config.shrink();
    }
    let mesh = config.mesh(arguments.nproc)?;
    let ranks = mesh.size_of(trainyard_train::data_axes());
    // The reference must see the same global batch.
    config.training.global_batch_size = Some(config.batching(ranks)?.global);
    config.validation.enable = false;
    config.checkpoint.enable = false;

    let folder = tempfile::tempdir().map_err(|source| EngineError::Io {
        path: std::env::temp_dir(),
        source,
    })?;
    let mut comparisons = Vec::new();
    for (config, tolerance) in [
        (in_fp64(&config), Tolerance::FP64),
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
            eprintln!("{name}: one rank, then {} ...", arguments.nproc);
        }
        let reference = folder.path().join(format!("{name}-1"));
        let strategy = folder.path().join(format!("{name}-{}", arguments.nproc));
        run(&config.on_one_rank(), 1, &reference, arguments.steps, None)?;
        run(
            &config,
            arguments.nproc,
            &strategy,
            arguments.steps,
            arguments.sabotage,
        )?;
        comparisons.push(compare(&reference, &strategy, arguments.nproc, tolerance)?);
    }
    let passed = comparisons.iter().all(Comparison::passed);
    match arguments.json {
        true => {
            let report = serde_json::json!({
                "mesh": mesh.to_string(),
                "nproc": arguments.nproc,
                "steps": arguments.steps,
                "passed": passed,
                "comparisons": comparisons,
            });
            println!(
                "{}",
                serde_json::to_string_pretty(&report).unwrap_or_default()
            );
        }
        false => {
            println!(
                "{mesh} on {} ranks against one rank, {} steps\n",
                arguments.nproc, arguments.steps
            );
            for comparison in &comparisons {
                println!("{comparison}");
            }
            println!("{}", if passed { "PASS" } else { "FAIL" });
        }
    }
    Ok(if passed {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// One rank's part: train, and leave what was computed in `out`.
pub fn execute_rank(arguments: RankArguments) -> Result<ExitCode> {
    let config = Config::load(&arguments.config, &[])?;
    rank::run(&config, arguments.steps, &arguments.out, arguments.sabotage)?;
    Ok(ExitCode::SUCCESS)
}

fn run(
    config: &Config,
    nproc: usize,
    out: &Path,
    steps: u64,
    sabotage: Option<Sabotage>,
) -> Result<()> {
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
    if let Some(sabotage) = sabotage {
        args.extend(["--sabotage".into(), sabotage.to_string().into()]);
    }
    run_locally(nproc, &args, Console::Silent)
}

fn in_fp64(config: &Config) -> Config {
    let mut config = config.clone();
    config.training.dtype = Dtype::Float64;
    config.training.mixed_precision_param = None;
    config.training.mixed_precision_reduce = None;
    config.parallelism.gradient_compression = GradientCompression::None;
    config
}

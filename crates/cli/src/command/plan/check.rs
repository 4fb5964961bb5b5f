//! `trainyard plan check`: estimates an existing config of any supported framework.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use serde_json::{Value, json};
use trainyard_interop::{Framework, LaunchInfo, TranslateOptions, Translation, load_decoder_with};
use trainyard_plan::{Calibration, Plan, PlanRequest, PrecisionByStage};
use trainyard_plan_report::{Report, describe, describe_term, dry_run_json, dry_run_table};

use super::dry_run::{DryRunOptions, dry_run_config, dry_run_plan};
use super::framework;
use super::request::{cluster, request};
use crate::command::foreign::{self, ForeignConfig};
use crate::failure::Failure;

/// Check whether a framework's config fits, estimate its step time, and suggest a faster plan
///
/// Reads Megatron-LM scripts, torchtitan TOML or command lines, DeepSpeed JSON, Accelerate YAML and Trainyard TOML.
/// Of another framework's config it also reports what every key becomes in Trainyard, as `train --from` does.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    trainyard plan check configs/llama3-70b.toml --cluster 64xH100\n  \
    trainyard plan check configs/llama3-8b.toml --cluster 8xH100 --dry-run --allocator cuda\n  \
    trainyard plan check pretrain.sh --cluster 64xH100 --json\n  \
    trainyard plan check ds_config.json --framework deepspeed --model config.json --cluster 16xA100 --seq-len 4096")]
pub(super) struct Check {
    /// The config file or script
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// The cluster: a short form such as 64xH100, or a cluster TOML
    #[arg(long, value_name = "CLUSTER")]
    cluster: String,
    /// The model, if the file does not contain it: a config TOML, a config.json, or a directory with one
    #[arg(long, value_name = "MODEL")]
    model: Option<PathBuf>,
    /// Sequence length, if the file does not contain it
    #[arg(long, value_name = "S")]
    seq_len: Option<usize>,
    /// The framework, if it cannot be detected: trainyard, torchtitan, torchtitan-flags, megatron, deepspeed,
    /// accelerate
    #[arg(long, value_name = "FRAMEWORK", value_parser = framework)]
    framework: Option<Framework>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Compare the memory by formula with a dry run of the training code, for every class of ranks
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    dry_run_options: DryRunOptions,
}

const GIB: f64 = 1024.0 * 1024.0 * 1024.0;

impl Check {
    /// Reads the config, estimates it, and compares it with the planner's choice. Exits with 1 if it does not fit.
    pub fn execute(self, overrides: &[String]) -> Result<ExitCode, Failure> {
        let cluster = cluster(&self.cluster)?;
        let file = foreign::load(&self.file, self.framework)?;
        let framework = file.framework;
        let translation = self.translation(&file, cluster.world_size())?;
        let launch = LaunchInfo {
            world: Some(cluster.world_size()),
            seq_len: self.seq_len,
            overrides: overrides.to_vec(),
        };
        let found = framework
            .read_with(&file.text, &launch)
            .map_err(|error| Failure::new(format!("{}: {error}", self.file.display())))?;
        let shape = match &self.model {
            Some(path) => {
                let keys = model_overrides(&translation);
                Some(load_decoder_with(path, &keys).map_err(Failure::new)?)
            }
            None => found.shape.clone(),
        };
        let shape = shape.ok_or_else(|| {
            Failure::new(format!(
                "{} does not contain the model",
                self.file.display()
            ))
            .hint("name one with --model")
        })?;
        let strategy = found.strategy.clone();
        let (needed, there) = (strategy.degrees.world_size(), cluster.world_size());
        if needed != there {
            return Err(Failure::new(format!(
                "the parallel degrees multiply to {needed} ranks, but the cluster has {there}"
            ))
            .hint(format!(
                "use a cluster of {needed} GPUs, or change a degree"
            )));
        }
        let (batch, seq_len) = (strategy.global_batch, strategy.seq_len);
        let precision = PrecisionByStage::same(strategy.precision);
        let mut request = request(shape, cluster, batch, seq_len, precision);
        request.calibration = Calibration::of_cluster(&request.cluster, found.software);
        let plan = request.estimate(&strategy).map_err(Failure::new)?;
        let dry_run = match (self.dry_run, framework) {
            (false, _) => None,
            (true, Framework::Trainyard) => Some(dry_run_config(
                &self.file,
                &found,
                &request,
                &self.dry_run_options,
                overrides,
            )?),
            (true, _) => Some(dry_run_plan(&strategy, &request, &self.dry_run_options)?),
        };
        if self.json {
            let fits = request.shortfall(&plan) <= 0.0;
            let mut checked = Report::of(request).checked_to_json(&plan);
            checked["framework"] = framework.to_string().into();
            checked["estimated_for"] = found.software.to_string().into();
            checked["not_in_estimate"] = found.unmodeled.into();
            checked["keys"] = json!(translation.keys);
            checked["dry_run"] = dry_run.as_ref().map_or(Value::Null, dry_run_json);
            println!("{checked:#}");
            return Ok(exit_code(fits));
        }
        println!("{framework}: {}", describe(&plan));
        println!("estimated for {}", found.software);
        for setting in &found.unmodeled {
            println!("not in the estimate: {setting}");
        }
        println!();
        let fits = print(&request, &plan);
        if let Some(run) = &dry_run {
            print!("{}", dry_run_table(&[(&plan.strategy, run)], &request));
        }
        suggest(request, plan);
        if !translation.keys.is_empty() {
            print!("\n{}", file.report(&translation, &[]));
        }
        Ok(exit_code(fits))
    }
}

fn exit_code(fits: bool) -> ExitCode {
    if fits {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

impl Check {
    fn translation(&self, file: &ForeignConfig, world: usize) -> Result<Translation, Failure> {
        if !file.framework.is_translated() {
            return Ok(Translation::default());
        }
        file.translation(&TranslateOptions {
            world: Some(world),
            has_model: self.model.is_some(),
        })
    }
}

/// The keys of the model that the file sets, such as its experts.
fn model_overrides(translation: &Translation) -> Vec<String> {
    let overrides = translation.overrides().into_iter();
    overrides
        .filter(|setting| setting.starts_with("--model."))
        .collect()
}

/// Prints the estimated memory and step time; returns whether the config fits.
fn print(request: &PlanRequest, plan: &Plan) -> bool {
    let shortfall = request.shortfall(plan);
    for memory in request.memories(&plan.strategy) {
        let total = memory.total() / GIB;
        println!("{:<14} {total:>8.1} GiB", memory.class.name());
    }
    if shortfall > 0.0 {
        println!("does not fit: {:.1} GiB more are needed", shortfall / GIB)
    } else {
        println!("fits, with {:.1} GiB to spare", -shortfall / GIB)
    }
    let time = &plan.time;
    println!(
        "\nstep {:.3} s ({:.3} to {:.3})",
        time.likely, time.low, time.high
    );
    let terms = time
        .terms()
        .into_iter()
        .filter(|(_, seconds)| *seconds > 0.0);
    for (name, seconds) in terms {
        let share = 100.0 * seconds / time.likely;
        println!("  {seconds:>9.3} s {share:>5.1} %  {}", describe_term(name));
    }
    shortfall <= 0.0
}

/// Prints the planner's choice and how it differs.
fn suggest(request: PlanRequest, plan: Plan) {
    let mut report = Report::of(request);
    report.compare(plan.clone());
    let Some(best) = report.best() else {
        for sentence in report.sentences() {
            println!("\n{sentence}");
        }
        return;
    };
    let gain = plan.time.likely / best.time.likely - 1.0;
    let fits = report.request.shortfall(&plan) <= 0.0;
    if fits && gain < 0.01 {
        println!("\nThe planner finds no plan that is more than 1 % faster.");
        return;
    }
    let gained = if fits {
        format!("{:+.1} % tokens per second", 100.0 * gain)
    } else {
        "which fits in memory".to_owned()
    };
    println!(
        "\nThe planner suggests {}: {:.3} s per step, {:.1} GiB, {gained}.",
        describe(best),
        best.time.likely,
        best.memory.total() / GIB
    );
    let terms = report
        .compared
        .iter()
        .flat_map(|compared| &compared.diff.terms);
    for (name, seconds) in terms.take(4) {
        println!("  {:>+9.3} s  {}", -seconds, describe_term(name));
    }
}

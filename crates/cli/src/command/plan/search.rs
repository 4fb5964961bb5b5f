//! `trainyard plan`: searches for the fastest strategy and explains it.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use trainyard_arch::DecoderConfig;
use trainyard_interop::{Framework, ModelFileError, load_decoder};
use trainyard_plan::{Cluster, Degrees, Precision, PrecisionByStage};
use trainyard_plan_report::{Report, Style};

use super::dry_run::{DryRunOptions, dry_run_plan};
use super::request::{cluster, precision, request};
use super::{framework, write};
use crate::command::dry_run::ALLOCATORS;
use crate::engine;
use crate::failure::Failure;

#[derive(Debug, Args)]
pub(super) struct Search {
    /// A Trainyard config TOML, a Hugging Face config.json, or a directory with one. Models other than decoders are
    /// planned by dry runs of the training code
    #[arg(long, value_name = "MODEL")]
    model: PathBuf,
    /// The cluster: a short form such as 64xH100, two sites as 2x64xH100@10Gb/s,30ms, or a cluster TOML
    #[arg(long, value_name = "CLUSTER")]
    cluster: String,
    /// Global batch size: samples in a step, over all ranks
    #[arg(long, value_name = "B", value_parser = count)]
    global_batch: usize,
    /// Sequence length: tokens of a sample; required for a decoder
    #[arg(long, value_name = "S", value_parser = count)]
    seq_len: Option<usize>,
    /// Precision: bf16 (bf16 weights with fp32 master weights), mixed (fp32 weights, cast for compute), fp32
    /// [default: bf16]
    #[arg(long, value_name = "bf16|mixed|fp32", value_parser = precision)]
    precision: Option<PrecisionByStage>,
    /// Number of plans to show
    #[arg(long, value_name = "N", default_value_t = 5)]
    top: usize,
    /// A mesh to compare with the best, as in pp=16,tp=8; the remaining ranks go to dp_shard
    #[arg(long, value_name = "AXES")]
    compare_mesh: Option<String>,
    /// Also show from which bandwidth between nodes or sites on compression, local updates and a parameter server pay; the
    /// default if the cluster has several sites
    #[arg(long)]
    slow_network: bool,
    /// Check the best N plans by a dry run of the training code, for every class of ranks
    #[arg(long, value_name = "N", num_args = 0..=1, require_equals = true, default_missing_value = "3", value_parser = count)]
    dry_run: Option<usize>,
    // Flattened options are impossible here: clap would ignore this optional group.
    /// Also measure CUDA's caching allocator in the dry runs, as `plan check` does
    #[arg(long, value_name = "SETTINGS", requires = "dry_run", value_parser = ALLOCATORS)]
    allocator: Option<String>,
    /// Skew of the experts' load in a dry run, as in `plan check`
    #[arg(
        long,
        value_name = "POWER",
        default_value_t = 0.0,
        requires = "dry_run"
    )]
    routing_skew: f64,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Write an HTML report to this file
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Write the best plan as a config for: trainyard, torchtitan, torchtitan-flags, megatron, deepspeed
    #[arg(long, value_name = "FRAMEWORK", value_parser = framework)]
    emit: Option<Framework>,
    /// Where to write that config; defaults to stdout, after the report
    #[arg(long, value_name = "FILE", requires = "emit")]
    output: Option<PathBuf>,
}

/// The largest plausible size.
const MAX_COUNT: u64 = 1 << 30;

fn count(text: &str) -> Result<usize, String> {
    match text.parse::<u64>() {
        Ok(number) if (1..=MAX_COUNT).contains(&number) => Ok(number as usize),
        _ => Err(format!("use a number from 1 to {MAX_COUNT}")),
    }
}

impl Search {
    /// Runs the search and prints the report. Exits with 1 if nothing fits.
    pub fn execute(self, overrides: &[String]) -> Result<ExitCode, Failure> {
        let shape = match load_decoder(&self.model) {
            Ok(shape) => shape,
            Err(ModelFileError::NotADecoder { .. }) => return Err(self.hand_over()),
            // A name that is unknown here may be registered in the user's own engine.
            Err(_) if engine::is_named() => return Err(self.hand_over()),
            Err(error) => return Err(Failure::new(error)),
        };
        self.search(shape, overrides)
    }

    /// The engine plans by dry runs what has no formula. Returns only on failure.
    fn hand_over(&self) -> Failure {
        let of_formulas = [
            ("--html", self.html.is_some()),
            ("--emit", self.emit.is_some()),
            ("--compare-mesh", self.compare_mesh.is_some()),
            ("--dry-run", self.dry_run.is_some()),
            ("--precision", self.precision.is_some()),
            ("--slow-network", self.slow_network),
        ];
        match of_formulas.iter().find(|(_, is_given)| *is_given) {
            Some((flag, _)) => Failure::usage(format!(
                "{flag} is only for decoders: `trainyard plan` has no formula for {}",
                self.model.display()
            ))
            .hint("every other model is planned by dry runs: set its precision with --training.mixed_precision_param"),
            None => engine::hand_over(),
        }
    }

    fn search(self, shape: DecoderConfig, overrides: &[String]) -> Result<ExitCode, Failure> {
        if let Some(first) = overrides.first() {
            return Err(Failure::usage(format!("{first} has no effect on the plan of a decoder"))
                .hint("change the key in the config file, or use the flags of `trainyard plan --help`"));
        }
        let seq_len = self.seq_len.ok_or_else(|| {
            Failure::usage("--seq-len is missing")
                .hint("a decoder's plan depends on the tokens of a sample")
        })?;
        let cluster = cluster(&self.cluster)?;
        let mesh = self.compare_mesh.as_deref();
        let mesh = mesh.map(|text| degrees(text, &cluster)).transpose()?;
        let request = request(
            shape,
            cluster,
            self.global_batch,
            seq_len,
            self.precision
                .unwrap_or(PrecisionByStage::same(Precision::BF16)),
        );
        let mut report = Report::of(request);
        if let Some(degrees) = mesh {
            report.compare_mesh(degrees);
            if report.compared.is_none() && report.best().is_some() {
                let hint = "tp must divide the attention heads, the data-parallel degree the samples, and cp the tokens";
                return Err(Failure::new(format!(
                    "the mesh {degrees} cannot divide this model and batch"
                ))
                .hint(hint));
            }
        }
        if self.slow_network || report.request.cluster.sites.is_some() {
            report.compare_methods();
        }
        let options = DryRunOptions {
            allocator: self.allocator.clone(),
            routing_skew: self.routing_skew,
        };
        for plan in report.result.plans.iter().take(self.num_dry_runs()) {
            report
                .dry_runs
                .push(dry_run_plan(&plan.strategy, &report.request, &options)?);
        }
        if self.json {
            println!("{:#}", report.to_json(self.top))
        } else {
            print!("{}", report.to_text(self.top, Style::for_stdout()))
        }
        if let Some(path) = &self.html {
            write(path, &report.to_html(self.top))?;
        }
        if let Some(framework) = self.emit {
            emit(&report, framework, self.output.as_deref())?;
        }
        match report.best() {
            Some(_) => Ok(ExitCode::SUCCESS),
            None => Ok(ExitCode::FAILURE),
        }
    }
}

impl Search {
    /// The number of plans to dry-run, at most the number of plans shown.
    fn num_dry_runs(&self) -> usize {
        self.dry_run.map_or(0, |most| most.min(self.top))
    }
}

/// Writes the best plan as a framework's config. Deviations from the plan go to stderr.
fn emit(report: &Report, framework: Framework, output: Option<&Path>) -> Result<(), Failure> {
    let Some(best) = report.best() else {
        return Err(Failure::new("nothing fits, so there is no plan to write"));
    };
    let world = best.strategy.degrees.world_size();
    let emitted = framework.write(&report.request.shape, &best.strategy, world);
    let emitted = emitted.map_err(Failure::new)?;
    for deviation in &emitted.deviations {
        eprintln!("{framework} cannot express the whole plan: {deviation}");
    }
    match output {
        Some(path) => write(path, &emitted.text),
        None => {
            println!("\n{}", emitted.text);
            Ok(())
        }
    }
}

/// Parses a mesh such as `pp=16,tp=8`; the remaining ranks go to `dp_shard`.
fn degrees(text: &str, cluster: &Cluster) -> Result<Degrees, Failure> {
    let invalid = |what: &str| {
        Failure::usage(format!("--compare-mesh {text}: {what}"))
            .hint("write it as pp=16,tp=8, with axes pp, dp_replicate, dp_shard, cp, tp, ep")
    };
    let mut degrees = Degrees::ONE;
    let mut has_shard = false;
    for pair in text.split(',') {
        let (axis, size) = pair.split_once('=').ok_or_else(|| invalid("missing ="))?;
        let size = count(size.trim()).map_err(|why| invalid(&why))?;
        has_shard |= axis.trim() == "dp_shard";
        *match axis.trim() {
            "pp" => &mut degrees.pp,
            "dp_replicate" => &mut degrees.dp_replicate,
            "dp_shard" => &mut degrees.dp_shard,
            "cp" => &mut degrees.cp,
            "tp" => &mut degrees.tp,
            "ep" => &mut degrees.ep,
            other => return Err(invalid(&format!("{other} is not an axis"))),
        } = size;
    }
    let world = cluster.world_size();
    let others = degrees.axes().into_iter().filter(|(axis, _)| *axis != "ep");
    let taken = others.fold(1usize, |all, (_, size)| all.saturating_mul(size));
    if !world.is_multiple_of(taken) || (has_shard && taken != world) {
        return Err(invalid(&format!(
            "the sizes multiply to {taken}, but the cluster has {world} GPUs"
        )));
    }
    if !has_shard {
        degrees.dp_shard = world / taken;
    }
    Ok(degrees)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remaining_ranks_go_to_dp_shard() {
        let cluster: Cluster = "16384xH100".parse().unwrap();
        let meta = degrees("pp=16, tp=8", &cluster).unwrap();
        assert_eq!(meta.to_string(), "pp16 dp_shard128 tp8");
        for invalid in ["pp", "pp=0", "pp=x", "qq=2", "pp=3", "dp_shard=2,tp=8", ""] {
            assert!(degrees(invalid, &cluster).is_err(), "{invalid}");
        }
    }
}

//! The question itself: which way is fastest, and why.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use trainyard_plan::report::Report;
use trainyard_plan::{Cluster, Degrees, Framework, Held, Shape};

use super::followed::follow;
use super::question::{cluster, held, question};
use super::{framework, style, write};
use crate::failure::Failure;

#[derive(Debug, Args)]
pub(super) struct Ask {
    /// A config TOML of ours, a Hugging Face config.json, or a folder with one
    #[arg(long, value_name = "MODEL")]
    model: PathBuf,
    /// The machines: as in 64xH100, or a cluster TOML
    #[arg(long, value_name = "CLUSTER")]
    cluster: String,
    /// Samples in a step, over all ranks
    #[arg(long, value_name = "B", value_parser = count)]
    global_batch: usize,
    /// Tokens of a sample
    #[arg(long, value_name = "S", value_parser = count)]
    seq_len: usize,
    /// How numbers are held: bf16 (weights in bf16 beside fp32 ones), mixed (fp32 weights, cast when
    /// needed), fp32
    #[arg(long, default_value = "bf16", value_name = "bf16|mixed|fp32", value_parser = held)]
    precision: Held,
    /// How many plans to show
    #[arg(long, value_name = "N", default_value_t = 5)]
    top: usize,
    /// A mesh to set beside the best, as in pp=16,tp=8; what is left goes to dp_shard
    #[arg(long, value_name = "AXES")]
    compare_mesh: Option<String>,
    /// Follow the first N plans by a dry run of the code that would run them, for every kind of rank
    #[arg(long, value_name = "N", num_args = 0..=1, require_equals = true, default_missing_value = "3", value_parser = count)]
    dry_run: Option<usize>,
    /// How unequal a dry run takes the loads of experts to be: by one over an expert's number to this power
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
    /// Write a page with pictures into this file
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Write the best plan as a config of: trainyard, torchtitan, torchtitan-flags, megatron, deepspeed
    #[arg(long, value_name = "FRAMEWORK", value_parser = framework)]
    emit: Option<Framework>,
    /// Where to write that config; after the report if not given
    #[arg(long, value_name = "FILE", requires = "emit")]
    output: Option<PathBuf>,
}

/// Sizes beyond this are a slip.
const MOST: u64 = 1 << 30;

fn count(text: &str) -> Result<usize, String> {
    match text.parse::<u64>() {
        Ok(number) if (1..=MOST).contains(&number) => Ok(number as usize),
        _ => Err(format!("use a number from 1 to {MOST}")),
    }
}

impl Ask {
    /// Searches, then tells.
    pub fn execute(self) -> Result<ExitCode, Failure> {
        let shape = Shape::load(&self.model).map_err(Failure::new)?;
        let cluster = cluster(&self.cluster)?;
        let mesh = self.compare_mesh.as_deref();
        let mesh = mesh.map(|text| degrees(text, &cluster)).transpose()?;
        let question = question(
            shape,
            cluster,
            self.global_batch,
            self.seq_len,
            self.precision,
        );
        let mut report = Report::of(question);
        if let Some(degrees) = mesh {
            report.compare_mesh(degrees);
            if report.compared.is_none() && report.best().is_some() {
                let hint = "heads divide by tp, samples by the data-parallel ranks, tokens by cp";
                return Err(Failure::new(format!("{degrees} cannot split this")).hint(hint));
            }
        }
        for plan in report.found.plans.iter().take(self.followed()) {
            report.dry_runs.push(follow(
                &report.question.shape,
                &plan.strategy,
                self.routing_skew,
            )?);
        }
        match self.json {
            true => println!("{:#}", report.to_json(self.top)),
            false => print!("{}", report.to_text(self.top, style())),
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

impl Ask {
    /// How many plans are followed: of those that are shown.
    fn followed(&self) -> usize {
        self.dry_run.map_or(0, |most| most.min(self.top))
    }
}

/// Writes the best plan in a framework's words; what they cannot say goes to stderr.
fn emit(report: &Report, framework: Framework, output: Option<&Path>) -> Result<(), Failure> {
    let Some(best) = report.best() else {
        return Err(Failure::new("nothing fits, so there is nothing to write"));
    };
    let world = best.strategy.degrees.world_size();
    let written = framework.write(&report.question.shape, &best.strategy, world);
    let written = written.map_err(Failure::new)?;
    for loss in &written.losses {
        eprintln!("{framework} cannot say all of it: {loss}");
    }
    match output {
        Some(path) => write(path, &written.text),
        None => {
            println!("\n{}", written.text);
            Ok(())
        }
    }
}

/// Sizes of axes, as in `pp=16,tp=8`; what they leave of the ranks goes to `dp_shard`.
fn degrees(text: &str, cluster: &Cluster) -> Result<Degrees, Failure> {
    let wrong = |what: &str| {
        Failure::usage(format!("--compare-mesh {text}: {what}"))
            .hint("write it as pp=16,tp=8, with axes pp, dp_replicate, dp_shard, cp, tp, ep")
    };
    let mut degrees = Degrees::ONE;
    let mut has_shard = false;
    for pair in text.split(',') {
        let (axis, size) = pair.split_once('=').ok_or_else(|| wrong("no ="))?;
        let size = count(size.trim()).map_err(|why| wrong(&why))?;
        has_shard |= axis.trim() == "dp_shard";
        *match axis.trim() {
            "pp" => &mut degrees.pp,
            "dp_replicate" => &mut degrees.dp_replicate,
            "dp_shard" => &mut degrees.dp_shard,
            "cp" => &mut degrees.cp,
            "tp" => &mut degrees.tp,
            "ep" => &mut degrees.ep,
            other => return Err(wrong(&format!("{other} is no axis"))),
        } = size;
    }
    let world = cluster.world_size();
    let others = degrees.axes().into_iter().filter(|(axis, _)| *axis != "ep");
    let taken = others.fold(1usize, |all, (_, size)| all.saturating_mul(size));
    if !world.is_multiple_of(taken) || (has_shard && taken != world) {
        return Err(wrong(&format!(
            "its sizes multiply to {taken}, not {world}"
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
    fn meshes_are_filled_up() {
        let cluster: Cluster = "16384xH100".parse().unwrap();
        let meta = degrees("pp=16, tp=8", &cluster).unwrap();
        assert_eq!(meta.to_string(), "pp16 dp_shard128 tp8");
        for wrong in ["pp", "pp=0", "pp=x", "qq=2", "pp=3", "dp_shard=2,tp=8", ""] {
            assert!(degrees(wrong, &cluster).is_err(), "{wrong}");
        }
    }
}

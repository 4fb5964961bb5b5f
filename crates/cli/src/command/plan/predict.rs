//! `trainyard plan predict`: predicts the step time of a config on a profiled node.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use serde_json::json;
use trainyard_config::{ActivationCheckpointMode, Config};
use trainyard_mesh::{Axis, AxisSet, Mesh};
use trainyard_plan::cost_model::{DryRun, NodeProfile, StepBreakdown, predict, predict_pipeline};

use super::dry_run::dry_run;
use super::read;
use crate::failure::Failure;

/// Predict the step time of a config on a node that `plan measure` has profiled
///
/// Runs one step of the training code on tensors without memory, and sums the profiled costs of its operators and
/// collectives.
#[derive(Debug, Args)]
#[command(
    override_usage = "trainyard plan predict CONFIG.toml --world N --profile FILE [--json] [--SECTION.KEY VALUE]...",
    after_help = "Example:\n  trainyard plan predict configs/llama-small.toml --world 2 --profile profile.json \\\n    \
    --parallelism.tensor_parallel_degree 2"
)]
pub(super) struct Predict {
    /// The config file
    #[arg(value_name = "CONFIG.toml")]
    config: PathBuf,
    /// Number of ranks of the job
    #[arg(long, value_name = "N")]
    world: usize,
    /// The profile that `plan measure` wrote
    #[arg(long, value_name = "FILE")]
    profile: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Predict {
    /// Runs the dry run and prints the predicted step time.
    pub fn execute(self, overrides: &[String]) -> Result<ExitCode, Failure> {
        let profile: NodeProfile =
            serde_json::from_str(&read(&self.profile)?).map_err(Failure::new)?;
        if profile.num_ranks != self.world {
            eprintln!(
                "warning: the profile was measured with {} ranks, not {}",
                profile.num_ranks, self.world
            );
        }
        let config = Config::load(&self.config, overrides).map_err(Failure::new)?;
        let mesh = config.mesh(self.world).map_err(Failure::new)?;
        let step = self.predict(&config, &mesh, &profile, overrides)?;
        if self.json {
            println!("{}", json!({"step_seconds": step.total(), "terms": step}))
        } else {
            print!("{}", table(&step))
        }
        Ok(ExitCode::SUCCESS)
    }

    fn predict(
        &self,
        config: &Config,
        mesh: &Mesh,
        profile: &NodeProfile,
        overrides: &[String],
    ) -> Result<StepBreakdown, Failure> {
        let pp = mesh.size(Axis::Pp);
        let ranks: Result<Vec<DryRun>, Failure> = (0..pp)
            .map(|stage| {
                let rank = stage * (self.world / pp);
                dry_run(&self.config, (self.world, rank), None, overrides)?.map_err(Failure::new)
            })
            .collect();
        let ranks = ranks?;
        if pp == 1 {
            return Ok(predict(profile, &ranks[0]));
        }
        let data_ranks = mesh.size_of(AxisSet::of(Axis::DATA));
        let batching = config.batching(data_ranks).map_err(Failure::new)?;
        let kind = config.parallelism.schedule_kind().map_err(Failure::new)?;
        let stages = kind
            .num_chunks()
            .unwrap_or(config.parallelism.pipeline_parallel_stages_per_rank);
        let schedule = kind
            .build(pp, batching.num_microbatches, stages)
            .map_err(Failure::new)?;
        let forwards = match config.activation_checkpoint.mode {
            ActivationCheckpointMode::Full => 2.0,
            _ => 1.0,
        };
        predict_pipeline(profile, &schedule, &ranks, forwards).map_err(Failure::new)
    }
}

fn table(step: &StepBreakdown) -> String {
    let total = step.total();
    let rows = [
        ("compute", step.compute),
        ("optimizer", step.optimizer),
        ("host", step.host),
        ("communication", step.communication),
        ("straggler wait", step.straggler_wait),
        ("bubble", step.bubble),
    ];
    let mut out = format!("step                {:>9.1} ms\n", total * 1e3);
    for (name, seconds) in rows {
        let share = 100.0 * seconds / total.max(f64::MIN_POSITIVE);
        out += &format!("  {name:<17} {:>9.1} ms  {share:5.1} %\n", seconds * 1e3);
    }
    if step.extrapolated > 0.01 * total {
        let share = 100.0 * step.extrapolated / total;
        out +=
            &format!("{share:.1} % of it is extrapolated, for operators that were not profiled\n");
    }
    out
}

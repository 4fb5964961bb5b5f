//! `trainyard plan predict`: how long a step of a config takes on a machine that was measured.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use serde_json::json;
use trainyard_config::{ActivationCheckpointMode, Config};
use trainyard_mesh::{Axis, Mesh};
use trainyard_plan::machine::{DryRun, Machine, Priced, price, price_pipeline};

use super::followed::dry_run;
use super::read;
use crate::failure::Failure;

/// Say how long a step will take on a machine that `plan measure` has seen
///
/// The code that would train runs one step on tensors without memory; every operator and every collective of
/// it is priced with what was measured.
#[derive(Debug, Args)]
#[command(
    override_usage = "trainyard plan predict CONFIG.toml --world N --machine FILE [--json] [--SECTION.KEY VALUE]...",
    after_help = "Example:\n  trainyard plan predict configs/llama-small.toml --world 2 --machine machine.json \\\n    \
    --parallelism.tensor_parallel_degree 2"
)]
pub(super) struct Predict {
    /// The config file
    #[arg(value_name = "CONFIG.toml")]
    config: PathBuf,
    /// How many ranks the job has
    #[arg(long, value_name = "N")]
    world: usize,
    /// What `plan measure` wrote
    #[arg(long, value_name = "FILE")]
    machine: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Predict {
    /// Follows the code and prices what it did.
    pub fn execute(self, overrides: &[String]) -> Result<ExitCode, Failure> {
        let machine: Machine = serde_json::from_str(&read(&self.machine)?).map_err(Failure::new)?;
        if machine.num_ranks != self.world {
            eprintln!(
                "warning: the machine was measured with {} ranks at work, not {}",
                machine.num_ranks, self.world
            );
        }
        let config = Config::load(&self.config, overrides).map_err(Failure::new)?;
        let mesh = config.mesh(self.world).map_err(Failure::new)?;
        let priced = self.price(&config, &mesh, &machine, overrides)?;
        match self.json {
            true => println!(
                "{}",
                json!({"step_seconds": priced.total(), "terms": priced})
            ),
            false => print!("{}", table(&priced)),
        }
        Ok(ExitCode::SUCCESS)
    }

    fn price(
        &self,
        config: &Config,
        mesh: &Mesh,
        machine: &Machine,
        overrides: &[String],
    ) -> Result<Priced, Failure> {
        let pp = mesh.size(Axis::Pp);
        let ranks: Result<Vec<DryRun>, Failure> = (0..pp)
            .map(|stage| {
                let rank = stage * (self.world / pp);
                dry_run(&self.config, self.world, rank, overrides)?.map_err(Failure::new)
            })
            .collect();
        let ranks = ranks?;
        if pp == 1 {
            return Ok(price(machine, &ranks[0]));
        }
        let data_ranks = mesh.size(Axis::DpReplicate) * mesh.size(Axis::DpShard);
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
        price_pipeline(machine, &schedule, &ranks, forwards).map_err(Failure::new)
    }
}

fn table(priced: &Priced) -> String {
    let total = priced.total();
    let rows = [
        ("compute", priced.compute),
        ("optimizer", priced.optimizer),
        ("between operators", priced.host),
        ("communication", priced.communication),
        ("waits", priced.waits),
        ("bubble", priced.bubble),
    ];
    let mut out = format!("step                {:>9.1} ms\n", total * 1e3);
    for (name, seconds) in rows {
        let share = 100.0 * seconds / total.max(f64::MIN_POSITIVE);
        out += &format!("  {name:<17} {:>9.1} ms  {share:5.1} %\n", seconds * 1e3);
    }
    if priced.guessed > 0.01 * total {
        let share = 100.0 * priced.guessed / total;
        out += &format!("{share:.1} % of it is of operators that were not measured\n");
    }
    out
}

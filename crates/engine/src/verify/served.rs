//! Parameter servers and workers of `trainyard verify`: they train, and write the results to compare.

use std::path::Path;

use serde::{Deserialize, Serialize};
use trainyard_nn::weights;
use trainyard_trace::{CollectiveKind, Ledger, Purpose};
use trainyard_train::full_state_dict::full_parameters;
use trainyard_train::parameter_server;
use trainyard_train::{TrainSpec, Trainer};

use crate::error::{EngineError, Result};
use crate::ranks::join;
use crate::served::{self, Part, Server};
use crate::verify::rank::{parameters_file, report_file, write_report};

/// The results of a server.
#[derive(Debug, Serialize, Deserialize)]
pub struct ServerReport {
    /// Mean loss over the global batch, per step.
    pub losses: Vec<f64>,
    /// Norm of the global gradient, per step; of the last update, if a step has several.
    pub grad_norms: Vec<f64>,
    /// Bytes that workers push in all steps, by formula.
    pub pushed_formula: u64,
    /// Bytes that workers pull in all steps, by formula.
    pub pulled_formula: u64,
}

/// The results of a worker.
#[derive(Debug, Serialize, Deserialize)]
pub struct WorkerReport {
    /// Bytes that it has pushed.
    pub pushed: u64,
    /// Bytes that it has pulled.
    pub pulled: u64,
}

/// The prefix of the names of workers' reports.
const WORKER_PREFIX: &str = "worker-";

/// Runs a server or a worker for `steps` steps of the workers.
pub fn run(spec: &TrainSpec, part: &Part, steps: u64, out: &Path) -> Result<()> {
    match part {
        Part::Server(server) => run_server(spec, server, steps, out),
        Part::Worker { servers } => run_worker(spec, servers, out),
    }
}

fn run_server(run: &TrainSpec, server: &Server, steps: u64, out: &Path) -> Result<()> {
    let (service, spec) = (server.service(run), &server.spec);
    let world = join(spec, Ledger::new)?;
    let mut trainer = Trainer::new(spec, &world, world.device().into())?;
    let (mut losses, mut grad_norms) = (Vec::new(), Vec::new());
    let steps = steps / service.sync_steps();
    parameter_server::serve_steps(service, steps, &mut trainer, &world, |trainer, outcome| {
        losses.push(trainer.loss_over_replicas(&outcome.local_loss)?);
        grad_norms.push(f64::try_from(&outcome.grad_norm)?);
        Ok(())
    })?;
    let count = (steps, server.num_servers);
    let exchanged = parameter_server::exchanged_bytes(run, service, &trainer, count)?;
    let report = ServerReport {
        losses,
        grad_norms,
        pushed_formula: exchanged.pushed,
        pulled_formula: exchanged.pulled,
    };
    write_report(&report_file(out, world.rank()), &report)?;
    let parameters = full_parameters(&trainer, &world)?;
    weights::save(parameters_file(out, world.rank()), &parameters)?;
    // Rank 0 may host the TCPStore: no rank exits before all are done.
    world.world_group()?.barrier()?.wait()?;
    Ok(())
}

fn run_worker(run: &TrainSpec, servers: &[String], out: &Path) -> Result<()> {
    let world = served::work(run, servers, Ledger::new)?;
    let totals = world.ledger().totals().collectives;
    let bytes = |kind, purpose| totals.get(&(kind, purpose)).map_or(0, |t| t.payload_bytes);
    let report = WorkerReport {
        pushed: bytes(CollectiveKind::Send, Purpose::Gradient),
        pulled: bytes(CollectiveKind::Recv, Purpose::Parameter),
    };
    let name = format!("{WORKER_PREFIX}{}.json", std::process::id());
    write_report(&out.join(name), &report)
}

/// The reports of all workers.
pub fn worker_reports(folder: &Path) -> Result<Vec<WorkerReport>> {
    let io = |source| EngineError::Io {
        path: folder.to_owned(),
        source,
    };
    let mut reports = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(io)? {
        let entry = entry.map_err(io)?;
        if entry
            .file_name()
            .to_string_lossy()
            .starts_with(WORKER_PREFIX)
        {
            let text = std::fs::read(entry.path()).map_err(io)?;
            let report = serde_json::from_slice(&text);
            reports.push(report.map_err(|error| EngineError::Rank(error.to_string()))?);
        }
    }
    Ok(reports)
}

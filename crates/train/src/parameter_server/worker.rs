//! A worker: pulls parameters, computes the gradients of some micro-batches or takes some steps of its own, and pushes the
//! result.

use std::thread;
use std::time::{Duration, Instant};

use tch::Tensor;
use trainyard_nn::Parameter;
use trainyard_param_server::{JobInfo, Piece, PieceGradient, Rows, ServerGroup};
use trainyard_torch::World;

use super::connection::{Connection, Ended, Work};
use super::local_steps::LocalSteps;
use super::piece_samples::PieceSamples;
use super::shards::{append_bytes, take_elements, values_of, write_values};
use super::{digest, run_secret};
use crate::error::{Result, TrainError};
use crate::train_spec::TrainSpec;
use crate::trainer::Trainer;

/// How long a worker waits before it tries again to reach servers.
const RECONNECT_DELAY: Duration = Duration::from_millis(200);

/// Computes gradients for the servers until there is no work left. If the servers restart, the worker joins again.
pub fn work(spec: &TrainSpec, world: &World, servers: &[String]) -> Result<()> {
    let mut client = Client {
        spec,
        world,
        worker: None,
        last_success: Instant::now(),
    };
    let patience = Duration::from_secs(spec.parameter_server.reconnect_timeout_seconds);
    loop {
        let failed = match client.session(servers) {
            Ok(()) => break,
            Err(Ended::Training(error)) => return Err(error),
            Err(Ended::Connection(error)) => error,
        };
        if !failed.is_transient() || client.last_success.elapsed() > patience {
            return Err(TrainError::ParameterServer(failed.to_string()));
        }
        tracing::debug!("the worker joins again: {failed}");
        thread::sleep(RECONNECT_DELAY);
    }
    let num_pieces = client.worker.map_or(0, |worker| worker.num_pieces);
    tracing::info!("there is no work left; this worker has computed {num_pieces} gradients");
    Ok(())
}

/// A worker and its runs of the protocol: one, unless servers restart.
struct Client<'a> {
    spec: &'a TrainSpec,
    world: &'a World,
    /// Set once it has joined, because servers know the size of the global batch.
    worker: Option<Worker>,
    last_success: Instant,
}

/// The model and the data of a worker.
struct Worker {
    trainer: Trainer,
    samples: PieceSamples,
    /// Set if it takes steps of its own.
    local_steps: Option<LocalSteps>,
    num_pieces: u64,
}

impl Client<'_> {
    /// Joins the servers and works until there is no work left.
    fn session(&mut self, servers: &[String]) -> Result<(), Ended> {
        let group = ServerGroup::join(servers, &run_secret()?, &digest(self.spec)?)?;
        // The connection renews the lease while the model is built.
        let connection = Connection::start(group, self.world.ledger()).map_err(|error| {
            TrainError::ParameterServer(format!("cannot start a thread: {error}"))
        })?;
        let number = connection.worker.0;
        tracing::info!(
            "worker {number} has joined {} parameter servers",
            servers.len()
        );
        let worker = match &mut self.worker {
            Some(worker) => worker,
            None => {
                let leader = connection.jobs.first();
                let leader = leader.ok_or_else(|| {
                    TrainError::ParameterServer("there are no servers".to_owned())
                })?;
                self.worker
                    .insert(Worker::new(self.spec, self.world, leader)?)
            }
        };
        if worker.local_steps.is_none() {
            connection.load(worker.samples.clone());
        }
        // The next piece and its parameters arrive while this one is computed, unless they depend on it.
        let section = &self.spec.parameter_server;
        let is_synchronous = section.staleness.bound() == Some(0);
        let takes_ahead = section.prefetch && !is_synchronous && !self.spec.has_local_updates();
        connection.request_work();
        while let Some(work) = connection.receive_work()? {
            if takes_ahead {
                connection.request_work();
            }
            worker.compute(&work, &connection)?;
            if !takes_ahead {
                connection.request_work();
            }
            self.last_success = Instant::now();
        }
        Ok(())
    }
}

impl Worker {
    fn new(run: &TrainSpec, world: &World, job: &JobInfo) -> Result<Worker> {
        let local_steps = LocalSteps::new(run, job);
        let global_batch = local_steps.map_or(job.global_batch, LocalSteps::replica_batch);
        let spec = &run.with_config(run.for_worker(global_batch)?);
        let trainer = Trainer::new(spec, world, world.device().into())?;
        Ok(Worker {
            samples: PieceSamples::open(spec, trainer.batching(), world.device())?,
            trainer,
            local_steps,
            num_pieces: 0,
        })
    }

    fn compute(&mut self, work: &Work, connection: &Connection) -> Result<()> {
        let began = Instant::now();
        let Work {
            piece,
            rows,
            parameters,
            ..
        } = work;
        for (job, bytes) in connection.jobs.iter().zip(&parameters.servers) {
            load_parameters(self.trainer.parameters(), job, rows, bytes)?;
        }
        let (loss, num_targets, gradients) = match self.local_steps {
            None => self.gradients(work, &connection.jobs)?,
            Some(local) => {
                let trainer = &mut self.trainer;
                let (loss, num_targets) = local.take(trainer, &self.samples.stream, *piece)?;
                let servers = connection.jobs.iter().zip(&parameters.servers);
                let weight = local.weight(trainer, num_targets);
                let moved = servers
                    .map(|(job, from)| movement_bytes(trainer.parameters(), job, from, weight));
                (loss, num_targets, moved.collect::<Result<Vec<_>>>()?)
            }
        };
        let gradient = PieceGradient {
            worker: connection.worker,
            piece: *piece,
            version: parameters.version,
            num_targets,
            loss: f64::try_from(&loss)?,
            seconds: began.elapsed().as_secs_f64(),
        };
        connection.push(gradient, rows.clone(), gradients);
        self.num_pieces += 1;
        Ok(())
    }

    /// The summed loss of a piece, the number of its targets, and the gradients for every server.
    fn gradients(&mut self, work: &Work, jobs: &[JobInfo]) -> Result<(Tensor, i64, Vec<Vec<u8>>)> {
        let Piece { step, first, .. } = work.piece;
        let (loss, num_targets) = self.trainer.gradients(&work.batches, step, first)?;
        let parameters = self.trainer.parameters();
        let gradients = jobs
            .iter()
            .map(|job| gradient_bytes(parameters, job, &work.rows));
        let gradients = gradients.collect::<Result<Vec<_>>>()?;
        self.trainer.model().zero_grad()?;
        Ok((loss, num_targets, gradients))
    }
}

/// Copies what a server holds into the parameters, of tables these rows.
fn load_parameters(
    parameters: &[Parameter],
    job: &JobInfo,
    rows: &Rows,
    bytes: &[u8],
) -> Result<()> {
    let mut bytes = bytes;
    for (parameter, shard) in parameters.iter().zip(&job.shards) {
        for part in shard.parts(rows) {
            let values = take_elements(&mut bytes, part.num_elements(), parameter.kind())?;
            write_values(parameter.tensor(), &part, &values)?;
        }
    }
    Ok(())
}

/// How far the parameters have moved from what a server holds, times `weight`.
fn movement_bytes(
    parameters: &[Parameter],
    job: &JobInfo,
    from: &[u8],
    weight: f64,
) -> Result<Vec<u8>> {
    let (mut from, mut bytes) = (from, Vec::new());
    for (parameter, shard) in parameters.iter().zip(&job.shards) {
        for part in shard.parts(&Rows::default()) {
            let values = take_elements(&mut from, part.num_elements(), parameter.kind())?;
            if !shard.is_trainable {
                continue;
            }
            let own = values_of(parameter.tensor(), &part)?;
            let moved = values.f_sub(&own.f_to_device(tch::Device::Cpu)?)?;
            append_bytes(&moved.f_mul_scalar(weight)?, &mut bytes)?;
        }
    }
    Ok(bytes)
}

/// The gradients of what a server holds, of tables of these rows; zeros for a parameter without a gradient.
fn gradient_bytes(parameters: &[Parameter], job: &JobInfo, rows: &Rows) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    for (parameter, shard) in parameters.iter().zip(&job.shards) {
        if !shard.is_trainable {
            continue;
        }
        let Some(gradient) = parameter.gradient()? else {
            bytes.resize(bytes.len() + shard.num_transferred_bytes(rows), 0);
            continue;
        };
        let gradient = gradient.f_contiguous()?;
        for part in shard.parts(rows) {
            append_bytes(&values_of(&gradient, &part)?, &mut bytes)?;
        }
    }
    Ok(bytes)
}

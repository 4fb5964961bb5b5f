//! A worker: pulls parameters, computes the gradients of some micro-batches or takes some steps of its own, and pushes the
//! result.

use std::thread;
use std::time::{Duration, Instant};

use trainyard_nn::Parameter;
use trainyard_param_server::{JobInfo, Piece, PieceGradient, Rows, ServerGroup};
use trainyard_torch::World;
use trainyard_trace::counted;

use super::connection::{Connection, Ended, Received, Work};
use super::local_steps::LocalSteps;
use super::piece_samples::PieceSamples;
use super::replica::{self, FromServers, Moved, Replica};
use super::shards::{append_bytes, take_elements, values_of, write_values};
use super::{digest, run_secret};
use crate::error::{Result, TrainError};
use crate::train_spec::TrainSpec;
use crate::trainer::Trainer;

/// How long a worker waits before it tries again to reach servers.
const RECONNECT_DELAY: Duration = Duration::from_millis(200);
/// How long rank 0 waits before it lets the other ranks know that there is nothing to do: less than the timeout of their
/// collectives.
const IDLE_INTERVAL: Duration = Duration::from_secs(5);

/// Computes gradients for the servers, or takes steps between outer steps, until there is no work left. If the servers restart,
/// the worker joins again. A worker of several ranks calls this on all of them.
pub fn work(spec: &TrainSpec, world: &World, servers: &[String]) -> Result<()> {
    if world.rank() > 0 {
        return replica::follow(spec, world);
    }
    let mut client = Client {
        spec,
        world,
        worker: None,
        num_pieces: 0,
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
        replica::keep_waiting(world)?;
    }
    let computed = counted(client.num_pieces, "piece");
    tracing::info!("there is no work left; this worker has computed {computed}");
    replica::stop(world)
}

/// A worker and its runs of the protocol: one, unless servers restart.
struct Client<'a> {
    spec: &'a TrainSpec,
    world: &'a World,
    /// Set once it has joined, because servers know the size of the global batch.
    worker: Option<Worker<'a>>,
    num_pieces: u64,
    last_success: Instant,
}

/// What a worker does with a piece.
enum Worker<'a> {
    /// It computes gradients.
    Gradients(Box<Gradients>),
    /// It takes steps of its own.
    Replica(Box<Replica<'a>>),
}

/// The model and the data of a worker that computes gradients.
struct Gradients {
    trainer: Trainer,
    samples: PieceSamples,
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
        if let Worker::Gradients(worker) = worker {
            connection.load(worker.samples.clone());
        }
        // The next piece and its parameters arrive while this one is computed, unless they depend on it.
        let section = &self.spec.parameter_server;
        let is_synchronous = section.staleness.bound() == Some(0);
        let takes_ahead = section.prefetch && !is_synchronous && !self.spec.has_local_updates();
        connection.request_work();
        loop {
            let work = match connection.receive_work(IDLE_INTERVAL)? {
                Received::Work(work) => work,
                Received::NotYet => {
                    replica::keep_waiting(self.world)?;
                    continue;
                }
                Received::Done => return Ok(()),
            };
            if takes_ahead {
                connection.request_work();
            }
            worker.compute(&work, &connection)?;
            if !takes_ahead {
                connection.request_work();
            }
            self.num_pieces += 1;
            self.last_success = Instant::now();
        }
    }
}

impl<'a> Worker<'a> {
    fn new(run: &TrainSpec, world: &'a World, job: &JobInfo) -> Result<Worker<'a>> {
        Ok(match LocalSteps::new(run, job) {
            Some(local_steps) => {
                let replica = Replica::lead(run, world, job, local_steps)?;
                Worker::Replica(Box::new(replica))
            }
            None => Worker::Gradients(Box::new(Gradients::new(run, world, job)?)),
        })
    }

    fn compute(&mut self, work: &Work, connection: &Connection) -> Result<()> {
        let began = Instant::now();
        let moved = match self {
            Worker::Gradients(worker) => worker.compute(work, &connection.jobs)?,
            Worker::Replica(replica) => {
                let from = FromServers {
                    jobs: &connection.jobs,
                    bytes: &work.parameters.servers,
                };
                replica.compute(work.piece, &from)?
            }
        };
        let gradient = PieceGradient {
            worker: connection.worker,
            piece: work.piece,
            version: work.parameters.version,
            num_targets: moved.num_targets,
            loss: moved.loss,
            seconds: began.elapsed().as_secs_f64(),
        };
        connection.push(gradient, work.rows.clone(), moved.bytes);
        Ok(())
    }
}

impl Gradients {
    fn new(run: &TrainSpec, world: &World, job: &JobInfo) -> Result<Gradients> {
        let spec = &run.with_config(run.for_worker(job.global_batch, 1)?);
        let trainer = Trainer::new(spec, world, world.device().into())?;
        Ok(Gradients {
            samples: PieceSamples::open(spec, trainer.batching(), world.device())?,
            trainer,
        })
    }

    /// The gradients of a piece.
    fn compute(&mut self, work: &Work, jobs: &[JobInfo]) -> Result<Moved> {
        for (job, bytes) in jobs.iter().zip(&work.parameters.servers) {
            load_parameters(self.trainer.parameters(), job, &work.rows, bytes)?;
        }
        let Piece { step, first, .. } = work.piece;
        let (loss, num_targets) = self.trainer.gradients(&work.batches, step, first)?;
        let parameters = self.trainer.parameters();
        let bytes = jobs
            .iter()
            .map(|job| gradient_bytes(parameters, job, &work.rows));
        let bytes = bytes.collect::<Result<Vec<_>>>()?;
        self.trainer.model().zero_grad()?;
        Ok(Moved {
            loss: f64::try_from(&loss)?,
            num_targets,
            bytes,
        })
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

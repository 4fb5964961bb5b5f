//! A worker: pulls parameters, computes the gradients of some micro-batches, pushes them.

use std::thread;
use std::time::{Duration, Instant};

use tch::Tensor;
use trainyard_data::SampleStream;
use trainyard_nn::Parameter;
use trainyard_param_server::{ClientError, JobInfo, Piece, PieceGradient, ServerGroup};
use trainyard_torch::World;

use super::connection::{Connection, Work};
use super::shards::{append_bytes, elements_of, take_elements};
use super::{digest, run_secret};
use crate::build::{self, Phase};
use crate::error::{Result, TrainError};
use crate::job;
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

/// Why a session ended early.
enum Ended {
    Connection(ClientError),
    Training(TrainError),
}

impl From<TrainError> for Ended {
    fn from(error: TrainError) -> Ended {
        Ended::Training(error)
    }
}

impl From<ClientError> for Ended {
    fn from(error: ClientError) -> Ended {
        Ended::Connection(error)
    }
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
    samples: SampleStream,
    num_pieces: u64,
}

impl Client<'_> {
    /// Joins the servers and works until there is no work left.
    fn session(&mut self, servers: &[String]) -> Result<(), Ended> {
        let group = ServerGroup::join(servers, &run_secret()?, &digest(self.spec)?)?;
        let connection = Connection::start(group).map_err(|error| {
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
                let global_batch = connection.jobs.first().map_or(0, |job| job.global_batch);
                self.worker
                    .insert(Worker::new(self.spec, self.world, global_batch)?)
            }
        };
        let is_synchronous = self.spec.parameter_server.staleness.bound() == Some(0);
        connection.request_work();
        while let Some(work) = connection.receive_work()? {
            // The next piece and its parameters arrive while this one is computed; in synchronous training they depend on it.
            if !is_synchronous {
                connection.request_work();
            }
            worker.compute(&work, &connection)?;
            if is_synchronous {
                connection.request_work();
            }
            self.last_success = Instant::now();
        }
        Ok(())
    }
}

impl Worker {
    fn new(spec: &TrainSpec, world: &World, global_batch: usize) -> Result<Worker> {
        let spec = &spec.with_config(spec.for_worker(global_batch)?);
        let source = build::source(spec, Phase::Training)?;
        Ok(Worker {
            trainer: Trainer::new(spec, world, world.device().into())?,
            samples: SampleStream {
                order: job::order(spec, Phase::Training, &*source),
                source,
                device: world.device(),
            },
            num_pieces: 0,
        })
    }

    fn compute(&mut self, work: &Work, connection: &Connection) -> Result<()> {
        let began = Instant::now();
        let Work { piece, parameters } = work;
        for (job, bytes) in connection.jobs.iter().zip(&parameters.servers) {
            load_parameters(self.trainer.parameters(), job, bytes)?;
        }
        let batches = self.batches(*piece)?;
        let (loss, num_targets) = self.trainer.gradients(&batches, piece.step, piece.first)?;
        let gradients = connection.jobs.iter();
        let gradients = gradients.map(|job| gradient_bytes(self.trainer.parameters(), job));
        let gradients = gradients.collect::<Result<Vec<_>>>()?;
        self.trainer.model().zero_grad()?;
        let gradient = PieceGradient {
            worker: connection.worker,
            piece: *piece,
            version: parameters.version,
            num_targets,
            loss: f64::try_from(&loss)?,
            seconds: began.elapsed().as_secs_f64(),
        };
        connection.push(gradient, gradients);
        self.num_pieces += 1;
        Ok(())
    }

    /// The micro-batches of a piece.
    fn batches(&self, piece: Piece) -> Result<Vec<trainyard_data::Batch>> {
        let batching = self.trainer.batching();
        let (global, local) = (batching.global as u64, batching.local as u64);
        let batch = |microbatch: u64| {
            let first = piece.step * global + microbatch * local;
            Ok(self.samples.batch(first..first + local)?)
        };
        (piece.first..piece.first + piece.num).map(batch).collect()
    }
}

/// Copies what a server holds into the parameters.
fn load_parameters(parameters: &[Parameter], job: &JobInfo, bytes: &[u8]) -> Result<()> {
    let mut bytes = bytes;
    for (parameter, shard) in parameters.iter().zip(&job.shards) {
        for elements in &shard.elements {
            let values = take_elements(&mut bytes, elements.len(), parameter.kind())?;
            let mut own = elements_of(parameter.tensor(), elements)?;
            own.f_copy_(&values)?;
        }
    }
    Ok(())
}

/// The gradients of what a server holds; zeros for a parameter without a gradient.
fn gradient_bytes(parameters: &[Parameter], job: &JobInfo) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    for (parameter, shard) in parameters.iter().zip(&job.shards) {
        if !shard.is_trainable {
            continue;
        }
        match parameter.gradient()? {
            Some(gradient) => append_elements(&gradient, &shard.elements, &mut bytes)?,
            None => bytes.resize(bytes.len() + shard.num_bytes(), 0),
        }
    }
    Ok(bytes)
}

fn append_elements(
    gradient: &Tensor,
    elements: &[std::ops::Range<usize>],
    to: &mut Vec<u8>,
) -> Result<()> {
    let gradient = gradient.f_contiguous()?;
    for elements in elements {
        append_bytes(&elements_of(&gradient, elements)?, to)?;
    }
    Ok(())
}

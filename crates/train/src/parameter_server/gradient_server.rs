//! The gradients of a server's steps, which workers push.
//!
//! All servers apply the same updates in the order of the leader, which broadcasts each of them. A step of the training loop
//! ends when the gradients of as many samples as a global batch has were applied.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tch::Tensor;
use trainyard_nn::Parameter;
use trainyard_param_server::{
    JobInfo, ParamShard, ParameterServer, Piece, PieceGradient, Progress, Update, UpdateRule,
    WorkQueue, WorkQueueOptions,
};
use trainyard_torch::{World, scalar};

use super::shards::{append_bytes, held_shards, lookup_tables, take_elements};
use super::{ServedState, Service, digest, run_secret};
use crate::checkpoint::broadcast_from_rank0;
use crate::error::{Result, TrainError};
use crate::trainer::{StepOutcome, Trainer};

/// How long the leader waits before it tells the other servers that there is nothing to do: less than the timeout of
/// their collectives.
const IDLE_INTERVAL: Duration = Duration::from_secs(5);
/// How long servers wait, at the end, for workers to learn that there is no work left.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(10);

/// What all servers do next, as the leader decides.
#[derive(Clone, Debug, Serialize, Deserialize)]
enum Decision {
    /// They wait.
    Idle,
    /// They apply an update.
    Apply {
        update: Update,
        /// What workers say of the gradients, in the order of the update.
        gradients: Vec<PieceGradient>,
        /// Whether the leader has seen values that are not finite.
        has_incident: bool,
        /// Whether the update ends a step.
        ends_step: bool,
    },
    /// They fail: there are no workers.
    Abandoned,
}

/// One of the servers.
pub(crate) struct GradientServer {
    server: ParameterServer,
    shards: Vec<ParamShard>,
    options: WorkQueueOptions,
    /// The number of updates of the published parameters.
    version: u64,
    is_staleness_aware: bool,
    /// The steps of a worker in one step of the servers.
    sync_steps: u64,
    /// How long to wait for a worker.
    patience: Duration,
    last_seen_worker: Instant,
}

/// The losses and targets of the updates of a step.
#[derive(Default)]
struct StepSums {
    loss: f64,
    num_targets: i64,
    staleness: u64,
}

impl GradientServer {
    /// Serves the parameters of `trainer`.
    pub(crate) fn start(
        service: Service<'_>,
        num_steps: u64,
        trainer: &mut Trainer,
        world: &World,
    ) -> Result<GradientServer> {
        let (run, sync_steps) = (service.run, service.sync_steps());
        ServedState::check(trainer.served().as_ref(), sync_steps)?;
        if trainer.parameters().iter().any(Parameter::is_running_stat) {
            return Err(TrainError::ParameterServer(
                "models with running statistics (batch normalization) are not supported: workers would have \
                 different ones"
                    .to_owned(),
            ));
        }
        let num_microbatches = trainer.batching().num_global_microbatches();
        let options = queue_options(service, num_microbatches, num_steps);
        let tables = lookup_tables(run, trainer.model());
        let shards = held_shards(trainer.parameters(), &tables, world)?;
        let job = JobInfo {
            digest: digest(run)?,
            global_batch: trainer.batching().global,
            pieces_per_step: service.workers.num.max(1),
            is_synchronous: options.update_rule == UpdateRule::Step,
            shards: shards.clone(),
        };
        let address = service.address;
        let queue = WorkQueue::new(options, &progress(trainer));
        let queue = (
            queue,
            Duration::from_secs_f64(run.local_updates.grace_seconds),
        );
        let server = ParameterServer::start(address, &run_secret()?, job, queue, world.rank() == 0);
        let server = server.map_err(|error| {
            TrainError::ParameterServer(format!("cannot listen on {address}: {error}"))
        })?;
        let server = GradientServer {
            server,
            shards,
            options,
            version: trainer.steps_taken(),
            is_staleness_aware: run.parameter_server.staleness_aware_lr,
            sync_steps,
            patience: Duration::from_secs(run.parameter_server.reconnect_timeout_seconds),
            last_seen_worker: Instant::now(),
        };
        server.publish(trainer, None)?;
        if world.rank() == 0 {
            tracing::info!(
                "parameter servers: {}; {}",
                world.size(),
                description(&options, sync_steps)
            );
        }
        Ok(server)
    }

    /// One step with the gradients of workers. This is a collective call.
    pub(crate) fn step(&mut self, trainer: &mut Trainer, world: &World) -> Result<StepOutcome> {
        let mut sums = StepSums::default();
        loop {
            let decision = self.decide(trainer, world)?;
            let Decision::Apply {
                update,
                gradients,
                has_incident,
                ends_step,
            } = decision
            else {
                continue;
            };
            let grad_norm = self.apply(trainer, &update, &gradients, &mut sums)?;
            if !ends_step {
                self.publish(trainer, Some(&update))?;
                continue;
            }
            let outcome = StepOutcome {
                local_loss: sums.local_loss(trainer, world)?,
                grad_norm,
                num_targets: sums.num_targets,
                learning_rate: trainer.next_learning_rate(),
                has_incident,
            };
            trainer.finish_step(&outcome)?;
            // Workers take pieces of the next step only now: the values of this one have been watched.
            self.publish(trainer, Some(&update))?;
            *trainer.served() = Some(ServedState {
                sync_steps: self.sync_steps,
                progress: self.server.progress(),
            });
            return Ok(outcome);
        }
    }

    /// Ends the service: workers learn that there is no work left.
    pub(crate) fn finish(&self) {
        self.server.wait_for_workers_to_leave(LEAVE_TIMEOUT);
    }

    /// The leader's decision, on all servers.
    fn decide(&mut self, trainer: &mut Trainer, world: &World) -> Result<Decision> {
        let own = if world.rank() == 0 {
            serde_json::to_vec(&self.next_decision(trainer)?).unwrap_or_default()
        } else {
            Vec::new()
        };
        let decision = broadcast_from_rank0(&own, world)?;
        let decision = serde_json::from_slice(&decision);
        match decision.map_err(|error| TrainError::ParameterServer(error.to_string()))? {
            Decision::Abandoned => Err(TrainError::ParameterServer(format!(
                "no worker has connected for {} s: start workers, or raise \
                 parameter_server.reconnect_timeout_seconds",
                self.patience.as_secs()
            ))),
            decision => Ok(decision),
        }
    }

    fn next_decision(&mut self, trainer: &mut Trainer) -> Result<Decision> {
        let Some(update) = self.server.next_update(IDLE_INTERVAL) else {
            if self.server.num_workers() > 0 {
                self.last_seen_worker = Instant::now();
            }
            let is_abandoned = self.last_seen_worker.elapsed() > self.patience;
            return Ok(if is_abandoned {
                Decision::Abandoned
            } else {
                Decision::Idle
            });
        };
        self.last_seen_worker = Instant::now();
        let gradients = update.pieces.iter().map(|&piece| {
            let accepted = self.server.take_accepted(piece);
            accepted.ok_or_else(|| missing(piece))
        });
        let gradients = gradients.collect::<Result<Vec<_>>>()?;
        let applied = self.server.num_applied();
        let own: u64 = update.pieces.iter().map(|piece| piece.num).sum();
        let end = (trainer.steps_taken() + 1) * self.options.microbatches_per_step;
        Ok(Decision::Apply {
            ends_step: applied + own >= end,
            update,
            gradients,
            has_incident: trainer.has_suspects()?,
        })
    }

    /// Updates the parameters with the sum of gradients.
    fn apply(
        &mut self,
        trainer: &mut Trainer,
        update: &Update,
        gradients: &[PieceGradient],
        sums: &mut StepSums,
    ) -> Result<Tensor> {
        self.set_gradients(trainer.parameters(), gradients)?;
        let num_targets: i64 = gradients.iter().map(|gradient| gradient.num_targets).sum();
        let correction = trainer.nominal_targets() / num_targets as f64;
        let staleness = gradients
            .iter()
            .map(|gradient| self.version.saturating_sub(gradient.version));
        let staleness = staleness.max().unwrap_or(0);
        let num: u64 = update.pieces.iter().map(|piece| piece.num).sum();
        // An update with a part of a step moves the parameters by that part of a step.
        let share = num as f64 / self.options.microbatches_per_step as f64;
        let divisor = if self.is_staleness_aware {
            staleness.max(1) as f64
        } else {
            1.0
        };
        let learning_rate = trainer.next_learning_rate() * share / divisor;
        let norm = trainer.update(correction, learning_rate)?;
        for parameter in trainer.parameters() {
            parameter.set_gradient(None);
        }
        self.version += 1;
        sums.loss += gradients.iter().map(|gradient| gradient.loss).sum::<f64>();
        sums.num_targets += num_targets;
        sums.staleness = sums.staleness.max(staleness);
        Ok(norm)
    }

    /// Gives every parameter the sum of the gradients of all pieces, in their order.
    fn set_gradients(&self, parameters: &[Parameter], gradients: &[PieceGradient]) -> Result<()> {
        for gradient in gradients {
            let bytes = self.server.take_gradient(gradient);
            let bytes = bytes.ok_or_else(|| missing(gradient.piece))?;
            let mut bytes = &bytes[..];
            for (parameter, shard) in parameters.iter().zip(&self.shards) {
                if !shard.is_trainable {
                    continue;
                }
                let num = shard.num_bytes() / shard.element_bytes;
                let gradient = take_elements(&mut bytes, num, parameter.kind())?;
                let gradient = gradient.f_to_device(parameter.tensor().device())?;
                let gradient = gradient.f_view_as(parameter.tensor())?;
                match parameter.gradient()? {
                    Some(mut sum) => drop(tch::no_grad(|| sum.f_add_(&gradient))?),
                    None => parameter.set_gradient(Some(gradient)),
                }
            }
        }
        Ok(())
    }

    fn publish(&self, trainer: &Trainer, update: Option<&Update>) -> Result<()> {
        trainer.wait_pending()?;
        let num_bytes = self.shards.iter().map(ParamShard::num_bytes).sum();
        let mut bytes = Vec::with_capacity(num_bytes);
        for parameter in trainer.parameters() {
            append_bytes(parameter.tensor(), &mut bytes)?;
        }
        self.server.publish(self.version, bytes, update);
        Ok(())
    }
}

impl StepSums {
    /// The mean loss of the step on the leader, zero elsewhere, so that the sum over servers is that loss.
    fn local_loss(&self, trainer: &Trainer, world: &World) -> Result<Tensor> {
        let first = trainer
            .parameters()
            .first()
            .ok_or(TrainError::NoParameters)?;
        let loss = if world.rank() == 0 {
            tracing::debug!(
                "gradients of this step were up to {} updates old",
                self.staleness
            );
            self.loss * trainer.nominal_targets() / self.num_targets as f64
        } else {
            0.0
        };
        Ok(scalar::double_like(first.tensor(), loss)?)
    }
}

/// The work of a run. A step is divided among as many pieces as there are workers at its start; a replica that takes steps of its
/// own takes one of them at a time.
pub(super) fn queue_options(
    service: Service<'_>,
    num_microbatches: u64,
    num_steps: u64,
) -> WorkQueueOptions {
    let (run, num_workers) = (service.run, service.workers.num.max(1) as u64);
    let section = &run.parameter_server;
    let bound = section.staleness.bound();
    let (max_staleness, update_rule) = match (run.has_local_updates(), run.local_updates.quorum) {
        (true, Some(quorum)) if bound != Some(0) => (bound, UpdateRule::Quorum(quorum)),
        (false, _) if bound != Some(0) => (bound, UpdateRule::Each),
        _ => (Some(0), UpdateRule::Step),
    };
    let (microbatches_per_step, microbatches_per_piece) = if run.has_local_updates() {
        (num_workers, 1)
    } else {
        (num_microbatches, num_microbatches.div_ceil(num_workers))
    };
    WorkQueueOptions {
        microbatches_per_step,
        microbatches_per_piece,
        num_steps,
        max_staleness,
        update_rule,
        is_balanced: section.balance_batches,
    }
}

fn description(options: &WorkQueueOptions, sync_steps: u64) -> String {
    let staleness = options
        .max_staleness
        .map_or("unbounded".to_owned(), |bound| bound.to_string());
    let num = options.microbatches_per_step;
    match options.update_rule {
        UpdateRule::Quorum(quorum) => format!(
            "outer steps with {quorum} of {num} replicas after {sync_steps} steps of their own; staleness {staleness}"
        ),
        UpdateRule::Step if sync_steps > 1 => {
            format!("outer steps with {num} replicas after {sync_steps} steps of their own")
        }
        UpdateRule::Step | UpdateRule::Each => format!("staleness {staleness}"),
    }
}

/// Where the work of a trainer begins.
fn progress(trainer: &mut Trainer) -> Progress {
    let step = trainer.steps_taken();
    let saved = trainer.served().clone();
    saved.map_or(
        Progress {
            step,
            applied: Vec::new(),
        },
        |saved| saved.progress,
    )
}

fn missing(piece: Piece) -> TrainError {
    let Piece { step, first, num } = piece;
    TrainError::ParameterServer(format!(
        "the gradient of micro-batches {first} to {} of step {} is not on this server",
        first + num - 1,
        step + 1
    ))
}

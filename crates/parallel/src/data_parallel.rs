//! Data parallelism in one process, with a thread per device.
//!
//! The simplest way to use one node. Every device has a replica of the model on its own thread. A step splits the
//! batch, runs all replicas, and leaves the sum of their gradients on the model for any optimizer. Replicas on CPU
//! share the model's memory; replicas on other devices get a copy.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use tch::Tensor;
use trainyard_nn::{Context, Model, Parameter};
use trainyard_torch::{autograd, device, meta, storage};

use crate::error::{ParallelError, Result};

/// A model trained by several threads of one process.
pub struct DataParallel<M> {
    model: M,
    parameters: Vec<Parameter>,
    replicas: Vec<Replica>,
}

/// A thread with a replica of the model.
struct Replica {
    work: Option<SyncSender<ReplicaBatch>>,
    done: Receiver<Outcome>,
    thread: Option<JoinHandle<()>>,
}

/// One replica's part of a batch, and the current parameters of the model.
struct ReplicaBatch {
    inputs: Tensor,
    targets: Tensor,
    num_targets: i64,
    step: u64,
    parameters: Vec<Tensor>,
}

/// The loss, and a gradient per parameter.
type Outcome = Result<(Tensor, Vec<Option<Tensor>>)>;

impl<M: Model> DataParallel<M> {
    /// Wraps `model` and starts `num_replicas - 1` further replicas, each built by `build` on its own thread.
    pub fn new<R: Model + 'static>(
        model: M,
        num_replicas: usize,
        build: impl Fn(usize) -> trainyard_nn::Result<R> + Send + Clone + 'static,
    ) -> Result<DataParallel<M>> {
        let replicas = (1..num_replicas)
            .map(|index| Replica::start(index, build.clone()))
            .collect::<Result<_>>()?;
        let parameters = model.parameters();
        Ok(DataParallel {
            model,
            parameters,
            replicas,
        })
    }

    /// The wrapped model, whose parameters an optimizer updates.
    pub fn model(&self) -> &M {
        &self.model
    }

    /// Clears the gradients of all parameters.
    pub fn zero_grad(&self) -> Result<()> {
        for parameter in &self.parameters {
            autograd::clear_grad(parameter.tensor())?;
        }
        Ok(())
    }

    /// Runs forward and backward on all replicas. Returns the mean loss over the batch; its gradients are on the
    /// model.
    pub fn step(&self, inputs: &Tensor, targets: &Tensor, step: u64) -> Result<Tensor> {
        let num_replicas = self.replicas.len() + 1;
        let rows = inputs.size().first().copied().unwrap_or(0);
        if rows % num_replicas as i64 != 0 {
            return Err(ParallelError::Indivisible { rows, num_replicas });
        }
        let inputs = inputs.f_chunk(num_replicas as i64, 0)?;
        let targets_of = targets.f_chunk(num_replicas as i64, 0)?;
        let num_targets = targets.numel() as i64;
        let batch_of = |index: usize| -> Result<ReplicaBatch> {
            let parameters = self.parameters.iter().map(shared_value);
            Ok(ReplicaBatch {
                inputs: inputs[index].shallow_clone(),
                targets: targets_of[index].shallow_clone(),
                num_targets,
                step,
                parameters: parameters.collect::<Result<_>>()?,
            })
        };
        for (index, replica) in self.replicas.iter().enumerate() {
            replica.send(index + 1, batch_of(index + 1)?)?;
        }
        let own = batch_of(0)?;
        let mut loss = forward_backward(&self.model, &own)?;
        for (index, replica) in self.replicas.iter().enumerate() {
            let (replica_loss, gradients) = replica.receive(index + 1)?;
            loss = loss.f_add(&replica_loss.f_to_device(loss.device())?)?;
            for (parameter, gradient) in self.parameters.iter().zip(gradients) {
                if let Some(gradient) = gradient {
                    add_gradient(parameter.tensor(), &gradient)?;
                }
            }
        }
        Ok(loss)
    }
}

impl Replica {
    fn start<R: Model + 'static>(
        index: usize,
        build: impl FnOnce(usize) -> trainyard_nn::Result<R> + Send + 'static,
    ) -> Result<Replica> {
        let (work, batches) = sync_channel::<ReplicaBatch>(1);
        let (results, done) = sync_channel::<Outcome>(1);
        let thread = std::thread::Builder::new()
            .name(format!("replica {index}"))
            .spawn(move || run_replica(build(index), batches, results))
            .map_err(|e| ParallelError::Replica {
                index,
                reason: e.to_string(),
            })?;
        Ok(Replica {
            work: Some(work),
            done,
            thread: Some(thread),
        })
    }

    fn send(&self, index: usize, batch: ReplicaBatch) -> Result<()> {
        let sent = self.work.as_ref().map(|work| work.send(batch).is_ok());
        match sent {
            Some(true) => Ok(()),
            // A replica that failed has sent its error before it exited.
            _ => self.receive(index).map(|_| ()),
        }
    }

    fn receive(&self, index: usize) -> Outcome {
        let gone = |_| ParallelError::Replica {
            index,
            reason: "its thread panicked".to_owned(),
        };
        self.done.recv().map_err(gone)?
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        drop(self.work.take());
        if let Some(thread) = self.thread.take() {
            // A panic of the replica has already been reported by the step that received from it.
            let _ = thread.join();
        }
    }
}

/// The main loop of a replica's thread: processes batches until the model is dropped.
fn run_replica<R: Model>(
    model: trainyard_nn::Result<R>,
    batches: Receiver<ReplicaBatch>,
    results: SyncSender<Outcome>,
) {
    let model = match model {
        Ok(model) => model,
        Err(error) => {
            let _ = results.send(Err(error.into()));
            return;
        }
    };
    for batch in batches {
        let outcome = replica_step(&model, &batch);
        if results.send(outcome).is_err() {
            return;
        }
    }
}

fn replica_step<R: Model>(model: &R, batch: &ReplicaBatch) -> Outcome {
    let parameters = model.parameters();
    for (parameter, value) in parameters.iter().zip(&batch.parameters) {
        sync_parameter(parameter.tensor(), value)?;
        autograd::clear_grad(parameter.tensor())?;
    }
    let loss = forward_backward(model, batch)?;
    let gradients = parameters.iter().map(|p| p.tensor().grad());
    Ok((loss, gradients.map(|g| g.defined().then_some(g)).collect()))
}

/// The values that a replica computes with. Running statistics are copied, because every replica updates them from its part
/// of the batch; those of the model itself are kept, as in PyTorch's `DataParallel`.
fn shared_value(parameter: &Parameter) -> Result<Tensor> {
    let value = parameter.tensor().f_detach()?;
    Ok(if parameter.is_running_stat() {
        value.f_detach_copy()?
    } else {
        value
    })
}

/// Gives a replica's parameter the model's values: shares memory on the same device, copies to another device.
fn sync_parameter(replica: &Tensor, value: &Tensor) -> Result<()> {
    if meta::is_meta(replica) || replica.device() == value.device() {
        storage::rebind(replica, value)?;
    } else {
        tch::no_grad(|| replica.shallow_clone().f_copy_(value))?;
    }
    Ok(())
}

/// Computes on the device of the replica, which becomes the current one: a new thread starts with the first GPU.
fn forward_backward<M: Model>(model: &M, batch: &ReplicaBatch) -> Result<Tensor> {
    let (mut inputs, mut targets) = (batch.inputs.shallow_clone(), batch.targets.shallow_clone());
    let parameters = model.parameters();
    if let Some(first) = parameters.first().filter(|p| !meta::is_meta(p.tensor())) {
        let own = first.tensor().device();
        device::set_current(own)?;
        (inputs, targets) = (inputs.f_to_device(own)?, targets.f_to_device(own)?);
    }
    let cx = Context::training(batch.step).with_loss_weight(1.0 / batch.num_targets as f64);
    let run = trainyard_nn::run(model, &inputs, &cx, &[])?;
    let sum = model.loss(run.output(), &targets)?;
    let loss = sum.f_div_scalar(batch.num_targets as f64)?;
    run.backward(&loss)?;
    Ok(loss.detach())
}

fn add_gradient(leaf: &Tensor, gradient: &Tensor) -> Result<()> {
    let own = leaf.f_grad()?;
    if !own.defined() {
        autograd::set_grad(leaf, &gradient.f_to_device(leaf.device())?)?;
        return Ok(());
    }
    let _ = tch::no_grad(|| {
        own.shallow_clone()
            .f_add_(&gradient.f_to_device(own.device())?)
    })?;
    Ok(())
}

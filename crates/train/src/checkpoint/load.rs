//! Loading a checkpoint into the shards that the ranks of this job hold.

use std::sync::Arc;

use tch::Tensor;
use trainyard_checkpoint::{
    Checkpoint, MODEL, ReadRequest, Store, group_by_bytes, model_name, optimizer_name,
};
use trainyard_mesh::{Slice, slice_of};
use trainyard_nn::dtype::kind_of;
use trainyard_nn::{Device, Parameter};
use trainyard_optim::Optimizer;
use trainyard_parallel::{ParamState, Strategy};
use trainyard_torch::{ReduceOp, TorchError, World, bytes};
use trainyard_trace::Purpose;

use super::save_plan::param_state_name;
use super::visit::Visit;
use crate::error::{Result, TrainError};
use crate::trainer::Trainer;

/// Bytes that are read before they are copied into the parameters; this limits host memory.
const READ_BATCH_BYTES: u64 = 256 << 20;

/// The directory of the latest complete checkpoint, as rank 0 finds it. This is a collective call.
pub fn latest(store: &dyn Store, world: &World) -> Result<Option<String>> {
    let found = match world.rank() {
        0 => trainyard_checkpoint::latest(store)?,
        _ => None,
    };
    // All ranks must load the same checkpoint, even if their views of the storage differ.
    let name = broadcast_from_rank0(found.unwrap_or_default().as_bytes(), world)?;
    let name = String::from_utf8_lossy(&name).into_owned();
    Ok(Some(name).filter(|name| !name.is_empty()))
}

/// Broadcasts the bytes of rank 0 to every rank. This is a collective call.
pub(crate) fn broadcast_from_rank0(bytes: &[u8], world: &World) -> Result<Vec<u8>> {
    let world_group = world.world_group()?;
    let length = Tensor::from_slice(&[bytes.len() as i64]);
    world_group.broadcast(&length, 0, Purpose::State)?.wait()?;
    let length = usize::try_from(length.f_int64_value(&[0])?).unwrap_or(0);
    let mut buffer = bytes.to_vec();
    buffer.resize(length, 0);
    if length == 0 {
        return Ok(buffer);
    }
    let buffer = Tensor::from_slice(&buffer);
    world_group.broadcast(&buffer, 0, Purpose::State)?.wait()?;
    Ok(Vec::<u8>::try_from(&buffer)?)
}

/// Loads model and optimizer state from a checkpoint. Every rank reads only its own shards.
pub fn load_step(
    store: Arc<dyn Store>,
    folder: &str,
    trainer: &mut Trainer,
    world: &World,
) -> Result<Checkpoint> {
    load_opened(Checkpoint::open(store, folder)?, trainer, world)
}

/// As [`load_step`], from a checkpoint that is already open.
pub fn load_opened(
    checkpoint: Checkpoint,
    trainer: &mut Trainer,
    world: &World,
) -> Result<Checkpoint> {
    let (model, optimizer) = trainer.model_and_optimizer();
    load_model(&checkpoint, model, optimizer, world)?;
    // A checkpoint without outer parameters is of replicas that are the same.
    trainer.restart_outer_loop()?;
    let states = trainer.param_states()?;
    load_param_states(&checkpoint, trainer.parameters(), &states, world)?;
    Ok(checkpoint)
}

/// Loads this rank's shards of parameters and of their optimizer state.
pub(super) fn load_model(
    checkpoint: &Checkpoint,
    model: &dyn Strategy,
    optimizer: &mut dyn Optimizer,
    world: &World,
) -> Result<()> {
    let parameters = model.parameters();
    if world.mesh().size(trainyard_mesh::Axis::Pp) == 1 {
        // A pipeline stage knows only its own parameters, so it cannot check for unexpected ones.
        let names: Vec<String> = parameters.iter().map(|p| model_name(p.name())).collect();
        checkpoint.expect_names(MODEL, names.iter().map(String::as_str))?;
    }
    optimizer.clear_state();
    let mut visit = Visit::default();
    let visited = model.load_states(optimizer, &mut |part, optimizer| {
        visit.go_on(load_part(checkpoint, part, optimizer, world))
    });
    visit.end(visited)
}

/// Loads what the strategy and the outer loop remember of parameters, if the checkpoint has it: a job with another strategy has saved
/// something else.
pub(super) fn load_param_states(
    checkpoint: &Checkpoint,
    parameters: &[Parameter],
    states: &[ParamState],
    world: &World,
) -> Result<()> {
    for state in states {
        let name = optimizer_name(&param_state_name(state.kind, &state.parameter));
        let parameter = parameters.iter().find(|p| p.name() == state.parameter);
        let (Some(parameter), true) = (parameter, checkpoint.tensor(&name).is_ok()) else {
            continue;
        };
        let request = request(name, parameter, world)?;
        for saved in read(checkpoint, &[request])? {
            state.load(&saved)?;
        }
    }
    Ok(())
}

/// Loads parameters that are in memory, and their optimizer state.
fn load_part(
    checkpoint: &Checkpoint,
    parameters: &[Parameter],
    optimizer: &mut dyn Optimizer,
    world: &World,
) -> Result<()> {
    load_parameters(checkpoint, parameters, world)?;
    let states = optimizer_states(checkpoint, parameters, optimizer, world)?;
    Ok(optimizer.load_state(states)?)
}

/// What all ranks together make of a load: the checkpoint, or `None` if a rank found it damaged, which that rank logs.
/// Every rank returns an error if another one failed otherwise. This is a collective call.
pub fn agree_on_load(loaded: Result<Checkpoint>, world: &World) -> Result<Option<Checkpoint>> {
    const WHOLE: i64 = 0;
    const DAMAGED: i64 = 1;
    const FAILED: i64 = 2;
    let own = match &loaded {
        Ok(_) => WHOLE,
        Err(TrainError::Checkpoint(error)) if error.is_damage() => {
            tracing::warn!(
                "rank {} cannot use a checkpoint and tries the one before it: {error}",
                world.rank()
            );
            DAMAGED
        }
        Err(_) => FAILED,
    };
    let worst = Tensor::from_slice(&[own]);
    let group = world.world_group()?;
    group
        .all_reduce(&worst, ReduceOp::Max, Purpose::State)?
        .wait()?;
    match worst.f_int64_value(&[0])? {
        WHOLE => loaded.map(Some),
        DAMAGED => Ok(None),
        _ => Err(loaded.err().unwrap_or(TrainError::OtherRankFailedToLoad)),
    }
}

fn load_parameters(checkpoint: &Checkpoint, parameters: &[Parameter], world: &World) -> Result<()> {
    let mut targets = Vec::new();
    for parameter in parameters {
        let name = model_name(parameter.name());
        let shape = &checkpoint.tensor(&name)?.shape;
        if shape != parameter.shape() {
            return Err(TrainError::StateShape {
                name,
                found: shape.clone(),
                expected: parameter.shape().to_vec(),
            });
        }
        targets.push((request(name, parameter, world)?, parameter));
    }
    for batch in group_by_bytes(&targets, READ_BATCH_BYTES, |(request, _)| {
        request.slice.num_elements() as u64 * 4
    }) {
        let requests: Vec<ReadRequest> = batch.iter().map(|(request, _)| request.clone()).collect();
        let tensors = read(checkpoint, &requests)?;
        for ((_, parameter), tensor) in batch.iter().zip(tensors) {
            let mut target = parameter.tensor().shallow_clone();
            tch::no_grad(|| target.f_copy_(&tensor.f_view_as(parameter.tensor())?))?;
        }
    }
    Ok(())
}

/// This rank's shard of the optimizer state.
fn optimizer_states(
    checkpoint: &Checkpoint,
    parameters: &[Parameter],
    optimizer: &dyn Optimizer,
    world: &World,
) -> Result<Vec<(String, Tensor)>> {
    let (mut names, mut requests, mut sizes) = (Vec::new(), Vec::new(), Vec::new());
    for parameter in parameters {
        for kind in optimizer.kinds() {
            let state = param_state_name(kind, parameter.name());
            let name = optimizer_name(&state);
            let Ok(entry) = checkpoint.tensor(&name) else {
                continue;
            };
            let is_scalar = entry.shape.is_empty();
            if !is_scalar && entry.shape != parameter.shape() {
                return Err(TrainError::StateShape {
                    name,
                    found: entry.shape.clone(),
                    expected: parameter.shape().to_vec(),
                });
            }
            sizes.push(if is_scalar {
                Vec::new()
            } else {
                parameter.tensor().size()
            });
            requests.push(if is_scalar {
                ReadRequest {
                    name,
                    slice: Slice::full(&[]),
                }
            } else {
                request(name, parameter, world)?
            });
            names.push(state);
        }
    }
    let tensors = read(checkpoint, &requests)?;
    let shaped = tensors
        .iter()
        .zip(&sizes)
        .map(|(tensor, size)| tensor.f_view(&size[..]));
    let shaped = shaped.collect::<Result<Vec<_>, _>>()?;
    Ok(names.into_iter().zip(shaped).collect())
}

/// Requests this rank's shard of a tensor that has the layout of `parameter`.
fn request(name: String, parameter: &Parameter, world: &World) -> Result<ReadRequest> {
    let slice = slice_of(
        parameter.shape(),
        &parameter.layout(),
        world.mesh(),
        world.rank(),
    );
    let slice = slice.map_err(|e| TorchError::Invalid(e.to_string()))?;
    Ok(ReadRequest { name, slice })
}

/// Reads the requested slices, each as a flat tensor of the dtype it was saved in.
fn read(checkpoint: &Checkpoint, requests: &[ReadRequest]) -> Result<Vec<Tensor>> {
    let mut tensors = Vec::with_capacity(requests.len());
    for request in requests {
        let dtype = checkpoint.tensor(&request.name)?.dtype;
        let kind = kind_of(dtype).ok_or_else(|| TrainError::StateDtype {
            name: request.name.clone(),
            dtype: dtype.to_string(),
        })?;
        tensors.push(Device::Cpu.empty(&[request.slice.num_elements()], kind)?);
    }
    checkpoint.read(requests, |index, start, chunk| {
        bytes::copy_in(&tensors[index], start, chunk)
    })?;
    Ok(tensors)
}

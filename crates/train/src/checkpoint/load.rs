//! Loading a state into whatever this job's ranks hold of it.

use std::sync::Arc;

use tch::Tensor;
use trainyard_checkpoint::{
    Checkpoint, MODEL, Store, Want, model_name, neighbours, optimizer_name,
};
use trainyard_mesh::{Slice, slice_of};
use trainyard_nn::dtype::kind_of;
use trainyard_nn::{Parameter, Place};
use trainyard_torch::{TorchError, World, bytes};
use trainyard_trace::Purpose;

use crate::error::{Result, TrainError};
use crate::trainer::Trainer;

/// Bytes that are read before they are put in their place.
const BATCH: u64 = 256 << 20;

/// The folder of the newest complete checkpoint, as the first rank finds it. All ranks must ask.
pub fn latest(store: &dyn Store, world: &World) -> Result<Option<String>> {
    let found = match world.rank() {
        0 => trainyard_checkpoint::latest(store)?,
        _ => None,
    };
    let mut text = [0u8; 64];
    if let Some(folder) = &found {
        text[..folder.len()].copy_from_slice(folder.as_bytes());
    }
    // All ranks load the same, whatever each of them sees.
    let name = Tensor::from_slice(&text);
    let everyone = world.everyone()?;
    everyone.broadcast(&name, 0, Purpose::State)?.wait()?;
    let name = Vec::<u8>::try_from(&name)?;
    let name: Vec<u8> = name.into_iter().take_while(|&byte| byte != 0).collect();
    let name = String::from_utf8_lossy(&name).into_owned();
    Ok(Some(name).filter(|name| !name.is_empty()))
}

/// Takes model and optimiser from a checkpoint. Every rank reads what it holds and no more.
pub fn load(
    store: Arc<dyn Store>,
    folder: &str,
    trainer: &mut Trainer,
    world: &World,
) -> Result<Checkpoint> {
    let checkpoint = Checkpoint::open(store, folder)?;
    let parameters = trainer.parameters().to_vec();
    if world.mesh().size(trainyard_mesh::Axis::Pp) == 1 {
        // A stage knows its own names alone.
        let names: Vec<String> = parameters.iter().map(|p| model_name(p.name())).collect();
        checkpoint.expect_names(MODEL, names.iter().map(String::as_str))?;
    }
    load_parameters(&checkpoint, &parameters, world)?;
    let states = optimizer_states(&checkpoint, trainer, world)?;
    trainer.optimizer_mut().load_state(states)?;
    Ok(checkpoint)
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
        targets.push((want(name, parameter, world)?, parameter));
    }
    for batch in neighbours(&targets, BATCH, |(want, _)| {
        want.slice.num_elements() as u64 * 4
    }) {
        let wants: Vec<Want> = batch.iter().map(|(want, _)| want.clone()).collect();
        let tensors = read(checkpoint, &wants)?;
        for ((_, parameter), tensor) in batch.iter().zip(tensors) {
            let mut target = parameter.tensor().shallow_clone();
            tch::no_grad(|| target.f_copy_(&tensor.f_view_as(parameter.tensor())?))?;
        }
    }
    Ok(())
}

/// This rank's part of the optimiser's state.
fn optimizer_states(
    checkpoint: &Checkpoint,
    trainer: &Trainer,
    world: &World,
) -> Result<Vec<(String, Tensor)>> {
    let (mut names, mut wants, mut sizes) = (Vec::new(), Vec::new(), Vec::new());
    for parameter in trainer.parameters() {
        for kind in trainer.optimizer().kinds() {
            let state = format!("{kind}.{}", parameter.name());
            let name = optimizer_name(&state);
            let Ok(entry) = checkpoint.tensor(&name) else {
                continue;
            };
            let is_number = entry.shape.is_empty();
            if !is_number && entry.shape != parameter.shape() {
                return Err(TrainError::StateShape {
                    name,
                    found: entry.shape.clone(),
                    expected: parameter.shape().to_vec(),
                });
            }
            sizes.push(if is_number {
                Vec::new()
            } else {
                parameter.tensor().size()
            });
            wants.push(match is_number {
                true => Want {
                    name,
                    slice: Slice::whole(&[]),
                },
                false => want(name, parameter, world)?,
            });
            names.push(state);
        }
    }
    let tensors = read(checkpoint, &wants)?;
    let shaped = tensors
        .iter()
        .zip(&sizes)
        .map(|(tensor, size)| tensor.f_view(&size[..]));
    let shaped = shaped.collect::<Result<Vec<_>, _>>()?;
    Ok(names.into_iter().zip(shaped).collect())
}

/// This rank's part of what is laid out as a parameter is.
fn want(name: String, parameter: &Parameter, world: &World) -> Result<Want> {
    let slice = slice_of(
        parameter.shape(),
        &parameter.layout(),
        world.mesh(),
        world.rank(),
    );
    let slice = slice.map_err(|e| TorchError::Invalid(e.to_string()))?;
    Ok(Want { name, slice })
}

/// Rows of elements in the types they were saved in.
fn read(checkpoint: &Checkpoint, wants: &[Want]) -> Result<Vec<Tensor>> {
    let mut tensors = Vec::with_capacity(wants.len());
    for want in wants {
        let dtype = checkpoint.tensor(&want.name)?.dtype;
        let kind = kind_of(dtype).ok_or_else(|| TrainError::StateDtype {
            name: want.name.clone(),
            dtype: dtype.to_string(),
        })?;
        tensors.push(Place::Cpu.empty(&[want.slice.num_elements()], kind)?);
    }
    checkpoint.read(wants, |index, start, piece| {
        bytes::copy_in(&tensors[index], start, piece)
    })?;
    Ok(tensors)
}

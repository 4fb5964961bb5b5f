//! The state of a job as one rank would hold it: to be saved, loaded and compared.
//!
//! Shards are put together and cut again by their layouts alone, so a state saved on one mesh loads
//! on any other. Every rank holds the whole state for a moment.

use std::collections::HashMap;

use tch::{Device, Kind, Tensor};
use trainyard_mesh::Axis;
use trainyard_nn::{Parameter, Place};
use trainyard_parallel::{part, whole};
use trainyard_torch::World;
use trainyard_trace::Purpose;

use crate::trainer::Trainer;
use crate::{Result, TrainError};

/// Every parameter, whole. All ranks must ask.
pub fn whole_parameters(trainer: &Trainer, world: &World) -> Result<Vec<Parameter>> {
    let mut all = Vec::new();
    trainer.model().with_parameters(&mut |p| {
        let tensor = whole(p, p.tensor(), world)?;
        all.push(Parameter::from_tensor(p.name(), tensor)?);
        Ok(())
    })?;
    of_all_stages(all, world)
}

/// The parameters of every stage of a pipeline, given those of this rank's.
fn of_all_stages(own: Vec<Parameter>, world: &World) -> Result<Vec<Parameter>> {
    let stages = world.group(Axis::Pp)?;
    if stages.size() == 1 {
        return Ok(own);
    }
    let share = |tensor: &Tensor, stage: usize| -> Result<()> {
        Ok(stages.broadcast(tensor, stage, Purpose::State)?.wait()?)
    };
    let kind = own.first().ok_or(TrainError::NoParameters)?.kind();
    let mut all = Vec::new();
    for stage in 0..stages.size() {
        let is_own = stage == stages.index();
        let names: Vec<_> = own.iter().map(|p| (p.name(), p.shape())).collect();
        let text = serde_json::to_vec(&names).unwrap_or_default();
        let length = Tensor::from_slice(&[text.len() as i64]);
        share(&length, stage)?;
        let length = length.f_int64_value(&[0])?;
        let bytes = match is_own {
            true => Tensor::from_slice(&text),
            false => Tensor::f_zeros(length, (Kind::Uint8, Device::Cpu))?,
        };
        share(&bytes, stage)?;
        let text = Vec::<u8>::try_from(&bytes)?;
        let names: Vec<(String, Vec<usize>)> = serde_json::from_slice(&text).unwrap_or_default();
        for (index, (name, shape)) in names.into_iter().enumerate() {
            let tensor = match is_own {
                true => own[index].tensor().f_detach()?.f_contiguous()?,
                false => Place::Cpu.empty(&shape, kind)?,
            };
            share(&tensor, stage)?;
            all.push(Parameter::from_tensor(name, tensor)?);
        }
    }
    Ok(all)
}

/// The optimiser's state, whole. All ranks must ask.
pub fn whole_optimizer(trainer: &Trainer, world: &World) -> Result<Vec<(String, Tensor)>> {
    let mut held: HashMap<String, Tensor> = trainer.optimizer().state().into_iter().collect();
    let mut all = Vec::new();
    for (kind, parameter) in entries(trainer) {
        let name = format!("{kind}.{}", parameter.name());
        let Some(state) = held.remove(&name) else {
            continue;
        };
        let state = match is_cut(parameter) && state.dim() > 0 {
            true => whole(parameter, &state, world)?,
            false => state,
        };
        all.push((name, state));
    }
    Ok(all)
}

/// Parameters of the same names and global shapes, with nothing in them yet.
pub fn blank_parameters(trainer: &Trainer) -> Result<Vec<Parameter>> {
    let parameters = trainer.parameters().iter();
    parameters
        .map(|p| {
            let empty = Place::Cpu.empty(p.shape(), p.kind())?;
            Ok(Parameter::from_tensor(p.name(), empty)?)
        })
        .collect()
}

/// Puts whole parameters where they belong.
pub fn load_parameters(trainer: &Trainer, world: &World, all: &[Parameter]) -> Result<()> {
    for (parameter, whole) in trainer.parameters().iter().zip(all) {
        let part = part(parameter, whole.tensor(), world)?;
        tch::no_grad(|| parameter.tensor().shallow_clone().f_copy_(&part))?;
    }
    Ok(())
}

/// This rank's part of a whole optimiser state.
pub fn part_of_optimizer(
    trainer: &Trainer,
    world: &World,
    all: Vec<(String, Tensor)>,
) -> Result<Vec<(String, Tensor)>> {
    let mut all: HashMap<String, Tensor> = all.into_iter().collect();
    let mut parts = Vec::new();
    for (kind, parameter) in entries(trainer) {
        let name = format!("{kind}.{}", parameter.name());
        let Some(state) = all.remove(&name) else {
            continue;
        };
        let part = match state.dim() > 0 {
            true => part(parameter, &state, world)?,
            false => state,
        };
        parts.push((name, part));
    }
    // What belongs to no parameter is for the optimiser to refuse.
    parts.extend(all);
    Ok(parts)
}

fn is_cut(parameter: &Parameter) -> bool {
    !parameter.layout().cut_axes().is_empty()
}

/// Every state there may be, in an order that is the same on all ranks.
fn entries(trainer: &Trainer) -> impl Iterator<Item = (&'static str, &Parameter)> {
    let kinds = trainer.optimizer().kinds();
    let parameters = trainer.parameters().iter();
    parameters.flat_map(move |parameter| {
        let kinds = kinds.clone().into_iter();
        kinds.map(move |kind| (kind, parameter))
    })
}

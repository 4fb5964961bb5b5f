//! Full (unsharded) parameters of a job on every rank, for comparison with another run.

use tch::{Kind, Tensor};
use trainyard_mesh::Axis;
use trainyard_nn::{Device, Parameter, Shards};
use trainyard_torch::World;
use trainyard_trace::Purpose;

use crate::trainer::Trainer;
use crate::{Result, TrainError};

/// Gathers every parameter of the model, unsharded, of all pipeline stages. This is a collective call.
pub fn full_parameters(trainer: &Trainer, world: &World) -> Result<Vec<Parameter>> {
    let mut all = Vec::new();
    trainer.model().visit_states(None, &mut |parameters| {
        for parameter in parameters {
            let full = Shards::of(parameter, world)?.gather(parameter.tensor())?;
            all.push(Parameter::from_tensor(parameter.name(), full.copy())?);
        }
        Ok(())
    })?;
    gather_stages(all, world)
}

/// Broadcasts the parameters of every pipeline stage to all stages.
fn gather_stages(own: Vec<Parameter>, world: &World) -> Result<Vec<Parameter>> {
    let stages = world.group(Axis::Pp)?;
    if stages.size() == 1 {
        return Ok(own);
    }
    let broadcast = |tensor: &Tensor, stage: usize| -> Result<()> {
        Ok(stages.broadcast(tensor, stage, Purpose::State)?.wait()?)
    };
    let kind = own.first().ok_or(TrainError::NoParameters)?.kind();
    let mut all = Vec::new();
    for stage in 0..stages.size() {
        let is_own = stage == stages.index();
        let names: Vec<_> = own.iter().map(|p| (p.name(), p.shape())).collect();
        let text = serde_json::to_vec(&names).unwrap_or_default();
        let length = Tensor::from_slice(&[text.len() as i64]);
        broadcast(&length, stage)?;
        let length = length.f_int64_value(&[0])?;
        let bytes = if is_own {
            Tensor::from_slice(&text)
        } else {
            Tensor::f_zeros(length, (Kind::Uint8, tch::Device::Cpu))?
        };
        broadcast(&bytes, stage)?;
        let text = Vec::<u8>::try_from(&bytes)?;
        let names: Vec<(String, Vec<usize>)> = serde_json::from_slice(&text).unwrap_or_default();
        for (index, (name, shape)) in names.into_iter().enumerate() {
            let tensor = if is_own {
                own[index].tensor().f_detach()?.f_contiguous()?
            } else {
                Device::from(world.device()).empty(&shape, kind)?
            };
            broadcast(&tensor, stage)?;
            all.push(Parameter::from_tensor(name, tensor)?);
        }
    }
    Ok(all)
}

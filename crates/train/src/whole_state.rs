//! The parameters of a job as one rank would hold them, to be compared.

use tch::{Device, Kind, Tensor};
use trainyard_mesh::Axis;
use trainyard_nn::{Parameter, Place};
use trainyard_parallel::whole;
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

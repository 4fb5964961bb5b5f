//! The bytes of parameters and gradients, as workers and servers exchange them.

use std::ops::Range;

use tch::{Kind, Tensor};
use trainyard_mesh::slice_of;
use trainyard_nn::Parameter;
use trainyard_param_server::ParamShard;
use trainyard_torch::{World, bytes};

use crate::error::{Result, TrainError};

/// What this rank of the servers holds of every parameter.
pub(super) fn held_shards(parameters: &[Parameter], world: &World) -> Result<Vec<ParamShard>> {
    let shard = |parameter: &Parameter| {
        let shape = parameter.shape();
        let slice = slice_of(shape, &parameter.layout(), world.mesh(), world.rank())?;
        let within = slice.flat.clone();
        let within = within.unwrap_or(0..slice.region.num_elements());
        Ok(ParamShard {
            name: parameter.name().to_owned(),
            elements: slice.region.runs_within(shape, within).collect(),
            element_bytes: parameter.kind().elt_size_in_bytes(),
            is_trainable: parameter.is_trainable(),
        })
    };
    parameters.iter().map(shard).collect()
}

/// The bytes of a tensor, wherever it is.
pub(super) fn append_bytes(tensor: &Tensor, to: &mut Vec<u8>) -> Result<()> {
    let host = tensor
        .f_detach()?
        .f_to_device(tch::Device::Cpu)?
        .f_contiguous()?;
    let start = to.len();
    to.resize(start + host.numel() * host.kind().elt_size_in_bytes(), 0);
    bytes::copy_out(&host, 0, &mut to[start..]).map_err(failed)
}

/// Takes the bytes of `num` elements off the front, as a tensor on the host.
pub(super) fn take_elements(from: &mut &[u8], num: usize, kind: Kind) -> Result<Tensor> {
    let num_bytes = num * kind.elt_size_in_bytes();
    let (own, rest) = from.split_at_checked(num_bytes).ok_or_else(|| {
        TrainError::ParameterServer(format!(
            "{num} elements of {kind:?} are missing from a message"
        ))
    })?;
    *from = rest;
    Ok(Tensor::f_from_data_size(own, &[num as i64], kind)?)
}

/// Some elements of a contiguous tensor, as a flat view.
pub(super) fn elements_of(tensor: &Tensor, elements: &Range<usize>) -> Result<Tensor> {
    let flat = tensor.f_detach()?.f_view(-1i64)?;
    Ok(flat.f_narrow(0, elements.start as i64, elements.len() as i64)?)
}

fn failed(error: std::io::Error) -> TrainError {
    TrainError::ParameterServer(error.to_string())
}

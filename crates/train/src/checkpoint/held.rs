//! What a rank holds of the job's state, and what of that it writes.

use std::collections::HashMap;

use tch::Tensor;
use trainyard_checkpoint::{Part, model_name, optimizer_name};
use trainyard_mesh::{AxisSet, Mesh, Slice, slice_of};
use trainyard_nn::Parameter;
use trainyard_nn::dtype::dtype_of;
use trainyard_torch::{TorchError, World};

use crate::error::{Result, TrainError};
use crate::trainer::Trainer;

/// A part of the state.
pub(super) struct Held {
    pub part: Part,
    pub tensor: Tensor,
    /// Along these axes other ranks hold the same.
    same_along: AxisSet,
}

/// Everything this rank holds, in an order that is the same for ranks that hold the same.
pub(super) fn held(trainer: &Trainer, world: &World) -> Result<Vec<Held>> {
    let copies = trainer.model().copies();
    let mut all = Vec::new();
    let mut states: HashMap<String, Tensor> = trainer.optimizer().state().into_iter().collect();
    for parameter in trainer.parameters() {
        // Of a copy the original is saved, with its states.
        if copies.iter().any(|copy| copy.is(parameter)) {
            continue;
        }
        let tensor = parameter.tensor().f_detach()?;
        all.push(Held::of(
            model_name(parameter.name()),
            parameter,
            tensor,
            world,
        )?);
        for kind in trainer.optimizer().kinds() {
            let name = format!("{kind}.{}", parameter.name());
            if let Some(state) = states.remove(&name) {
                all.push(Held::of(optimizer_name(&name), parameter, state, world)?);
            }
        }
    }
    all.retain(|held| !held.part.slice.is_empty());
    Ok(all)
}

/// Of what this rank holds, what it writes: ranks that hold the same share the work evenly.
pub(super) fn written(held: Vec<Held>, mesh: &Mesh, rank: usize) -> Result<Vec<Held>> {
    let mut loads: HashMap<AxisSet, Vec<u64>> = HashMap::new();
    let mut own = Vec::new();
    for item in held {
        let axes = item.same_along;
        let index = mesh.index_in_group(rank, axes).map_err(invalid)?;
        let loads = loads
            .entry(axes)
            .or_insert_with(|| vec![0; mesh.size_of(axes)]);
        let Some(least) = (0..loads.len()).min_by_key(|&i| loads[i]) else {
            continue;
        };
        loads[least] += item.part.num_bytes().unwrap_or(0);
        if least == index {
            own.push(item);
        }
    }
    Ok(own)
}

impl Held {
    /// A tensor that is laid out as a parameter is; a single number is everybody's.
    fn of(name: String, parameter: &Parameter, tensor: Tensor, world: &World) -> Result<Held> {
        let layout = parameter.layout();
        let is_number = tensor.dim() == 0 && !parameter.shape().is_empty();
        let (shape, slice, same_along) = match is_number {
            true => {
                let all = layout.same_axes().union(layout.cut_axes());
                (Vec::new(), Slice::whole(&[]), all)
            }
            false => {
                let shape = parameter.shape().to_vec();
                let slice = slice_of(&shape, &layout, world.mesh(), world.rank());
                (shape, slice.map_err(invalid)?, layout.same_axes())
            }
        };
        let kind = tensor.f_kind()?;
        let dtype = dtype_of(kind).ok_or_else(|| TrainError::StateKind {
            name: name.clone(),
            kind,
        })?;
        Ok(Held {
            part: Part {
                name,
                dtype,
                shape,
                slice,
            },
            tensor,
            same_along,
        })
    }
}

fn invalid(error: trainyard_mesh::MeshError) -> TrainError {
    TorchError::Invalid(error.to_string()).into()
}

//! The save plan: which state tensors a rank holds, and which of them it writes.

use std::collections::{BTreeMap, HashMap};

use tch::Tensor;
use trainyard_checkpoint::{WriteItem, model_name, optimizer_name};
use trainyard_mesh::{AxisSet, Mesh, Slice, slice_of};
use trainyard_nn::Parameter;
use trainyard_nn::dtype::dtype_of;
use trainyard_optim::Optimizer;
use trainyard_parallel::{ParamState, Strategy};
use trainyard_torch::{Group, ReduceOp, TorchError, World};
use trainyard_trace::Purpose;

use crate::error::{Result, TrainError};

/// What is saved beside parameters and optimizer states.
pub(super) struct Beside<'a> {
    /// What the strategy and the outer loop remember.
    pub states: &'a [ParamState],
    /// The ranks whose parameters and optimizer states differ from those of this rank, if there are any: their mean is saved.
    pub outer_group: Option<&'a Group>,
}

impl Beside<'_> {
    /// The mean of a tensor over replicas that take steps of their own. This is a collective call.
    fn averaged(&self, tensor: &Tensor) -> Result<Tensor> {
        let Some(group) = self.outer_group.filter(|_| tensor.is_floating_point()) else {
            return Ok(tensor.shallow_clone());
        };
        let mean = tensor.f_detach_copy()?;
        group
            .all_reduce(&mean, ReduceOp::Mean, Purpose::State)?
            .wait()?;
        Ok(mean)
    }
}

/// This rank's shard of one tensor of the training state.
pub(super) struct StateTensor {
    pub item: WriteItem,
    /// The parameter whose value or optimizer state this is.
    pub parameter: String,
    /// Without memory while it is offloaded.
    pub tensor: Tensor,
    /// Mesh axes along which other ranks hold the same shard.
    replicated_along: AxisSet,
}

/// The name of a parameter's state, of the optimizer or of the strategy.
pub(super) fn param_state_name(kind: &str, parameter: &str) -> String {
    format!("{kind}.{parameter}")
}

/// All state tensors of this rank. Ranks that hold the same shards list them in the same order.
pub(super) fn local_state(
    model: &dyn Strategy,
    optimizer: &dyn Optimizer,
    beside: Beside<'_>,
    world: &World,
) -> Result<Vec<StateTensor>> {
    let tied_replicas = model.tied_replicas();
    let mut all = Vec::new();
    // In the same order on all ranks, because saving them may communicate.
    let mut states: BTreeMap<String, Tensor> = optimizer.state().into_iter().collect();
    let mut kinds = optimizer.kinds();
    for state in states.values_mut() {
        *state = beside.averaged(state)?;
    }
    for state in beside.states {
        let saved = state.saved()?;
        states.insert(param_state_name(state.kind, &state.parameter), saved);
        if !kinds.contains(&state.kind) {
            kinds.push(state.kind);
        }
    }
    for parameter in &model.parameters() {
        // A tied replica is not saved: the rank with the original saves it and its optimizer state.
        if tied_replicas.iter().any(|replica| replica.is(parameter)) {
            continue;
        }
        let tensor = beside.averaged(parameter.tensor())?;
        all.push(StateTensor::of(
            model_name(parameter.name()),
            parameter,
            tensor,
            world,
        )?);
        for kind in &kinds {
            let name = param_state_name(kind, parameter.name());
            if let Some(state) = states.remove(&name) {
                all.push(StateTensor::of(
                    optimizer_name(&name),
                    parameter,
                    state,
                    world,
                )?);
            }
        }
    }
    all.retain(|state| !state.item.slice.is_empty());
    Ok(all)
}

/// The state tensors that this rank writes. Every shard is written once, and replicas of it divide the bytes evenly.
pub(super) fn assign_writes(
    state: Vec<StateTensor>,
    mesh: &Mesh,
    rank: usize,
) -> Result<Vec<StateTensor>> {
    let mut bytes_by_rank: HashMap<AxisSet, Vec<u64>> = HashMap::new();
    let mut own = Vec::new();
    for tensor in state {
        let axes = tensor.replicated_along;
        let index = mesh.index_in_group(rank, axes).map_err(invalid)?;
        let bytes_by_rank = bytes_by_rank
            .entry(axes)
            .or_insert_with(|| vec![0; mesh.size_of(axes)]);
        let Some(writer) = (0..bytes_by_rank.len()).min_by_key(|&i| bytes_by_rank[i]) else {
            continue;
        };
        bytes_by_rank[writer] += tensor.item.num_bytes().unwrap_or(0);
        if writer == index {
            own.push(tensor);
        }
    }
    Ok(own)
}

impl StateTensor {
    /// A tensor with the layout of `parameter`. A scalar is replicated on every rank that has the parameter.
    fn of(
        name: String,
        parameter: &Parameter,
        tensor: Tensor,
        world: &World,
    ) -> Result<StateTensor> {
        let layout = parameter.layout();
        let is_scalar = tensor.dim() == 0 && !parameter.shape().is_empty();
        let (shape, slice, replicated_along) = if is_scalar {
            let all = layout.replicated_axes().union(layout.sharded_axes());
            (Vec::new(), Slice::full(&[]), all)
        } else {
            let shape = parameter.shape().to_vec();
            let slice = slice_of(&shape, &layout, world.mesh(), world.rank());
            (shape, slice.map_err(invalid)?, layout.replicated_axes())
        };
        let kind = tensor.f_kind()?;
        let dtype = dtype_of(kind).ok_or_else(|| TrainError::StateKind {
            name: name.clone(),
            kind,
        })?;
        Ok(StateTensor {
            item: WriteItem {
                name,
                dtype,
                shape,
                slice,
            },
            parameter: parameter.name().to_owned(),
            tensor,
            replicated_along,
        })
    }
}

fn invalid(error: trainyard_mesh::MeshError) -> TrainError {
    TorchError::Invalid(error.to_string()).into()
}

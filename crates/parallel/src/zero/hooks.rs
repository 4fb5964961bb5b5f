//! Hooks that drive FSDP: before and after each unit, and when a gradient is accumulated.

use std::sync::{Arc, Mutex};

use tch::{Kind, Tensor};
use trainyard_nn::{Result, UnitCall, UnitHooks};
use trainyard_torch::autograd::{HookHandle, post_accumulate_hook};

use super::fsdp_state::FsdpState;
use crate::lock::lock;

/// Gathers parameters, releases them and reduces gradients around each unit.
pub(super) struct FsdpHooks {
    pub state: Arc<Mutex<FsdpState>>,
    /// The type that the model's output is cast to.
    pub output: Option<Kind>,
}

impl UnitHooks for FsdpHooks {
    fn before_forward(&self, call: &UnitCall) -> Result<()> {
        Ok(lock(&self.state).before_forward(call.index)?)
    }

    fn after_forward(&self, call: &UnitCall) -> Result<()> {
        Ok(lock(&self.state).after_forward(call.index, call.context.training)?)
    }

    fn before_backward(&self, call: &UnitCall) -> Result<()> {
        Ok(lock(&self.state).before_backward(call.index)?)
    }

    fn after_backward(&self, call: &UnitCall) -> Result<()> {
        Ok(lock(&self.state).after_backward(call.index)?)
    }

    fn wrap(
        &self,
        call: &UnitCall,
        x: &Tensor,
        forward: &dyn Fn(&Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let output = forward(x)?;
        match self.output {
            Some(kind) if call.is_last() => Ok(output.f_to_kind(kind)?),
            _ => Ok(output),
        }
    }
}

/// Registers a hook on every leaf that reports its accumulated gradient to the state.
pub(super) fn register_grad_hooks(
    state: &Arc<Mutex<FsdpState>>,
) -> trainyard_torch::Result<Vec<HookHandle>> {
    let leaves: Vec<(usize, usize, Tensor)> = lock(state)
        .handles()
        .flat_map(|(index, handle)| {
            let leaves = handle.leaves().enumerate();
            leaves.map(move |(member, leaf)| (index, member, leaf.shallow_clone()))
        })
        .collect();
    let hook = |(index, member, leaf): (usize, usize, Tensor)| {
        let state = Arc::clone(state);
        post_accumulate_hook(&leaf, move |_| lock(&state).gradient_ready(index, member))
    };
    leaves.into_iter().map(hook).collect()
}

//! What happens to shards at the call site of units, and when a gradient is complete.

use std::sync::{Arc, Mutex};

use tch::{Kind, Tensor};
use trainyard_nn::{Intercept, Result, UnitCall};
use trainyard_torch::autograd::{HookHandle, post_accumulate_hook};

use super::lock;
use super::shards::Shards;

/// Gathers, releases and reduces at the call site of units.
pub(super) struct AtUnits {
    pub shards: Arc<Mutex<Shards>>,
    /// What the model's output is cast to.
    pub output: Option<Kind>,
}

impl Intercept for AtUnits {
    fn before_forward(&self, call: &UnitCall) -> Result<()> {
        Ok(lock(&self.shards).before_forward(call.index)?)
    }

    fn after_forward(&self, call: &UnitCall) -> Result<()> {
        Ok(lock(&self.shards).after_forward(call.index, call.context.training)?)
    }

    fn before_backward(&self, call: &UnitCall) -> Result<()> {
        Ok(lock(&self.shards).before_backward(call.index)?)
    }

    fn after_backward(&self, call: &UnitCall) -> Result<()> {
        Ok(lock(&self.shards).after_backward(call.index)?)
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

/// Tells the shards of every gradient that is complete.
pub(super) fn listen(shards: &Arc<Mutex<Shards>>) -> trainyard_torch::Result<Vec<HookHandle>> {
    let leaves: Vec<(usize, usize, Tensor)> = lock(shards)
        .units()
        .flat_map(|(index, unit)| {
            let leaves = unit.leaves().enumerate();
            leaves.map(move |(member, leaf)| (index, member, leaf.shallow_clone()))
        })
        .collect();
    let hook = |(index, member, leaf): (usize, usize, Tensor)| {
        let shards = Arc::clone(shards);
        post_accumulate_hook(&leaf, move |_| lock(&shards).gradient_ready(index, member))
    };
    leaves.into_iter().map(hook).collect()
}

//! BatchNorm: each channel is normalized over the batch of a rank, or over the batches of a group of ranks.

use tch::Tensor;
use trainyard_torch::Group;

use crate::loss::wide;
use crate::sync_batch_norm::{NormState, sync_batch_norm};
use crate::{Builder, Context, Init, Module, Parameter, Result, is_recomputing};

/// Defaults of PyTorch's BatchNorm.
const EPS: f64 = 1e-5;
const MOMENTUM: f64 = 0.1;

/// Normalizes the channels of `x` [batch, channels, ..], with a learned scale and bias. In evaluation it uses running
/// statistics, which are buffers of the model.
#[derive(Module)]
pub struct BatchNorm {
    weight: Parameter,
    bias: Parameter,
    running_mean: Parameter,
    running_var: Parameter,
    /// The ranks over whose batches statistics are computed; none for those of this rank.
    #[module(skip)]
    group: Option<Group>,
}

impl BatchNorm {
    /// A norm of `num_channels` with the defaults of PyTorch, over the batch of this rank.
    pub fn build(builder: &Builder, num_channels: usize) -> Result<BatchNorm> {
        let shape = [num_channels];
        Ok(BatchNorm {
            weight: builder.parameter("weight", &shape, Init::Ones)?,
            bias: builder.parameter("bias", &shape, Init::Zeros)?,
            running_mean: builder.running_stat("running_mean", &shape, Init::Zeros)?,
            running_var: builder.running_stat("running_var", &shape, Init::Ones)?,
            group: None,
        })
    }

    /// The same over the batches of all ranks of a group, as PyTorch's `SyncBatchNorm`.
    #[must_use]
    pub fn synchronized(self, group: &Group) -> BatchNorm {
        BatchNorm {
            group: (group.size() > 1).then(|| group.clone()),
            ..self
        }
    }

    /// The normalized `x`, computed in at least fp32.
    pub fn forward(&self, x: &Tensor, cx: &Context) -> Result<Tensor> {
        let group = match &self.group {
            Some(group) if cx.training => group,
            _ => return self.over_own_batch(x, cx),
        };
        let state = NormState {
            weight: &self.weight.value()?,
            bias: &self.bias.value()?,
            running_mean: self.running_mean.tensor(),
            running_var: self.running_var.tensor(),
            momentum: MOMENTUM,
            eps: EPS,
        };
        Ok(sync_batch_norm(x, &state, group, !cx.is_idle)?)
    }

    fn over_own_batch(&self, x: &Tensor, cx: &Context) -> Result<Tensor> {
        let kind = wide(x.kind());
        let is_counted = !is_recomputing() && !cx.is_idle;
        let uses_stats = is_counted || !cx.training;
        let normed = x.f_to_kind(kind)?.f_batch_norm(
            Some(&self.weight.value()?.f_to_kind(kind)?),
            Some(&self.bias.value()?.f_to_kind(kind)?),
            uses_stats.then(|| self.running_mean.tensor()),
            uses_stats.then(|| self.running_var.tensor()),
            cx.training,
            MOMENTUM,
            EPS,
            true,
        )?;
        Ok(normed.f_to_kind(x.kind())?)
    }
}

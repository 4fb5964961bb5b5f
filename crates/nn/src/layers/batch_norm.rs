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
        let kind = wide(x.kind());
        let wide_x = x.f_to_kind(kind)?;
        let weight = self.weight.value()?.f_to_kind(kind)?;
        let bias = self.bias.value()?.f_to_kind(kind)?;
        let normed = match &self.group {
            Some(group) if cx.training => {
                let state = NormState {
                    weight: &weight,
                    bias: &bias,
                    running_mean: self.running_mean.tensor(),
                    running_var: self.running_var.tensor(),
                    momentum: MOMENTUM,
                    eps: EPS,
                };
                sync_batch_norm(&wide_x, &state, group, !cx.is_idle)?
            }
            _ => self.over_own_batch(&wide_x, &weight, &bias, cx)?,
        };
        Ok(normed.f_to_kind(x.kind())?)
    }

    fn over_own_batch(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: &Tensor,
        cx: &Context,
    ) -> Result<Tensor> {
        let is_counted = !is_recomputing() && !cx.is_idle;
        let uses_stats = is_counted || !cx.training;
        Ok(x.f_batch_norm(
            Some(weight),
            Some(bias),
            uses_stats.then(|| self.running_mean.tensor()),
            uses_stats.then(|| self.running_var.tensor()),
            cx.training,
            MOMENTUM,
            EPS,
            true,
        )?)
    }
}

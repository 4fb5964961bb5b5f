//! BatchNorm over the batches of several ranks, as PyTorch's `SyncBatchNorm`: one collective in forward, one in backward.

use tch::{Tensor, nn};
use trainyard_torch::{Group, ReduceOp, Result, autograd, meta};
use trainyard_trace::Purpose;

use crate::is_recomputing;
use crate::loss::wide;

/// The tensors and constants of a norm, except its input.
pub(crate) struct NormState<'a> {
    /// [channels]
    pub weight: &'a Tensor,
    /// [channels]
    pub bias: &'a Tensor,
    /// [channels]
    pub running_mean: &'a Tensor,
    /// [channels]
    pub running_var: &'a Tensor,
    pub momentum: f64,
    pub eps: f64,
}

/// Normalizes every channel of `x` [batch, channels, ..] by its mean and variance over the batches of all ranks of `group`,
/// and moves the running statistics towards them, in at least fp32. A batch that is not counted is normalized by the statistics of the others.
pub(crate) fn sync_batch_norm(
    x: &Tensor,
    state: &NormState<'_>,
    group: &Group,
    is_counted: bool,
) -> Result<Tensor> {
    let (eps, other) = (state.eps, group.clone());
    let (kind, given) = (wide(x.kind()), x.kind());
    let [x, weight, bias] = [x, state.weight, state.bias].map(|t| t.f_to_kind(kind));
    let normed = autograd::apply(
        &[&x?, &weight?, &bias?],
        |saver, inputs| {
            let [x, weight, bias] = inputs else {
                return Ok(Tensor::new());
            };
            let own = Moments::of(x)?;
            let moments = if is_counted { own } else { own.of_nothing()? }.over_group(group)?;
            if !is_recomputing() {
                moments.update(state)?;
            }
            let inverse_std = moments.var()?.f_add_scalar(eps)?.f_rsqrt()?;
            for tensor in [x, weight, &moments.mean, &inverse_std, &moments.count] {
                saver.save(tensor);
            }
            let normed = normalized(x, &moments.mean, &inverse_std)?;
            normed
                .f_mul(&along_channels(weight, x)?)?
                .f_add(&along_channels(bias, x)?)
                .map_err(Into::into)
        },
        move |saved, gradients| {
            let ([x, weight, mean, inverse_std, count], [Some(gradient)]) = (saved, gradients)
            else {
                return Ok(vec![None, None, None]);
            };
            let normed = normalized(x, mean, inverse_std)?;
            let bias_grad = sum_of_channels(gradient)?;
            let weight_grad = sum_of_channels(&gradient.f_mul(&normed)?)?;
            // Every rank's output depends on every rank's input through the mean and the variance.
            let sums = Tensor::f_stack(&[&bias_grad, &weight_grad], 0)?;
            other
                .all_reduce(&sums, ReduceOp::Sum, Purpose::Activation)?
                .wait()?;
            let means = sums.f_div(count)?;
            let of_mean = along_channels(&means.f_get(0)?, x)?;
            let of_var = normed.f_mul(&along_channels(&means.f_get(1)?, x)?)?;
            let scale = along_channels(&inverse_std.f_mul(weight)?, x)?;
            let from_statistics = of_mean.f_add(&of_var)?;
            let x_grad = if is_counted {
                gradient.f_sub(&from_statistics)?.f_mul(&scale)?
            } else {
                gradient.f_mul(&scale)?
            };
            Ok(vec![Some(x_grad), Some(weight_grad), Some(bias_grad)])
        },
    )?;
    Ok(normed.f_to_kind(given)?)
}

/// The moments of every channel over a batch.
struct Moments {
    /// Values per channel. [1]
    count: Tensor,
    /// [channels]
    mean: Tensor,
    /// The sum of squares of differences from the mean. [channels]
    squares: Tensor,
}

impl Moments {
    /// Those of this rank's batch, which may be empty.
    fn of(x: &Tensor) -> Result<Moments> {
        let num_channels = x.size().get(1).copied().unwrap_or(1).max(1);
        let count = (x.numel() as i64 / num_channels) as f64;
        let mean = sum_of_channels(x)?.f_div_scalar(count.max(1.0))?;
        let centered = x.f_sub(&along_channels(&mean, x)?)?;
        Ok(Moments {
            squares: sum_of_channels(&centered.f_square()?)?,
            count: mean.f_narrow(0, 0, 1)?.f_full_like(count)?,
            mean,
        })
    }

    /// Those of no values, in the same shape.
    fn of_nothing(&self) -> Result<Moments> {
        Ok(Moments {
            count: self.count.f_zeros_like()?,
            mean: self.mean.f_zeros_like()?,
            squares: self.squares.f_zeros_like()?,
        })
    }

    /// Those of the batches of all ranks: each rank sends its own, in one collective. Batches may differ in size.
    fn over_group(self, group: &Group) -> Result<Moments> {
        let num_channels = self.mean.numel() as i64;
        let own = Tensor::f_cat(&[&self.mean, &self.squares, &self.count], 0)?;
        let shape = [group.size() as i64, own.numel() as i64];
        let all = meta::new_empty(&own, &shape)?;
        group
            .all_gather(&all.f_view(-1i64)?, &own, Purpose::Activation)?
            .wait()?;
        let [means, squares, counts] = [
            (0, num_channels),
            (num_channels, num_channels),
            (2 * num_channels, 1),
        ]
        .map(|(start, length)| all.f_narrow(1, start, length));
        let (means, squares, counts) = (means?, squares?, counts?);
        let over_ranks = |t: &Tensor| t.f_sum_dim_intlist([0i64].as_slice(), false, own.kind());
        let count = over_ranks(&counts)?;
        let mean = over_ranks(&means.f_mul(&counts)?)?.f_div(&count)?;
        let between = means.f_sub(&mean)?.f_square()?.f_mul(&counts)?;
        Ok(Moments {
            squares: over_ranks(&squares.f_add(&between)?)?,
            count,
            mean,
        })
    }

    /// The variance of the batch. [channels]
    fn var(&self) -> Result<Tensor> {
        Ok(self.squares.f_div(&self.count)?)
    }

    /// Moves running statistics towards these, with the unbiased variance.
    fn update(&self, state: &NormState<'_>) -> Result<()> {
        let unbiased = self.squares.f_div(&self.count.f_sub_scalar(1)?)?;
        for (running, batch) in [
            (state.running_mean, &self.mean),
            (state.running_var, &unbiased),
        ] {
            let batch = batch.f_to_kind(running.kind())?;
            let _ = running.shallow_clone().f_lerp_(&batch, state.momentum)?;
        }
        Ok(())
    }
}

fn normalized(x: &Tensor, mean: &Tensor, inverse_std: &Tensor) -> Result<Tensor> {
    let centered = x.f_sub(&along_channels(mean, x)?)?;
    Ok(centered.f_mul(&along_channels(inverse_std, x)?)?)
}

/// The sum over all dims but the second. [channels]
fn sum_of_channels(x: &Tensor) -> Result<Tensor> {
    let dims: Vec<i64> = (0..x.dim() as i64).filter(|&dim| dim != 1).collect();
    Ok(x.f_sum_dim_intlist(&dims[..], false, x.kind())?)
}

/// A tensor of channels in a shape that broadcasts to `x`.
fn along_channels(per_channel: &Tensor, x: &Tensor) -> Result<Tensor> {
    let mut shape = vec![1; x.dim()];
    shape[1] = -1;
    Ok(per_channel.f_view(&shape[..])?)
}

/// A BatchNorm of a `tch` model over the batches of several ranks.
#[derive(Debug)]
pub struct SyncBatchNorm {
    norm: nn::BatchNorm,
    weight: Tensor,
    bias: Tensor,
    config: nn::BatchNormConfig,
    group: Group,
}

/// Makes a `tch` BatchNorm, built with `config`, compute its statistics over the batches of all ranks of `group`. Its
/// variables stay in their `VarStore`.
///
/// ```no_run
/// # use tch::nn::{self, ModuleT};
/// # use trainyard_nn::convert_sync_batchnorm;
/// # fn build(vs: &nn::VarStore, dp: &trainyard_torch::Group) -> trainyard_nn::Result<()> {
/// let config = nn::BatchNormConfig::default();
/// let norm = nn::batch_norm2d(vs.root() / "norm", 32, config);
/// let norm = convert_sync_batchnorm(norm, config, dp)?;
/// # let x = tch::Tensor::new();
/// let y = norm.forward_t(&x, true);
/// # Ok(())
/// # }
/// ```
pub fn convert_sync_batchnorm(
    norm: nn::BatchNorm,
    config: nn::BatchNormConfig,
    group: &Group,
) -> crate::Result<SyncBatchNorm> {
    let or = |own: &Option<Tensor>, default: f64| match own {
        Some(own) => Ok(own.shallow_clone()),
        None => norm.running_mean.f_full_like(default),
    };
    Ok(SyncBatchNorm {
        weight: or(&norm.ws, 1.0)?,
        bias: or(&norm.bs, 0.0)?,
        config,
        group: group.clone(),
        norm,
    })
}

impl nn::ModuleT for SyncBatchNorm {
    /// Panics if the collective fails, because the trait of `tch` has no errors.
    fn forward_t(&self, x: &Tensor, is_training: bool) -> Tensor {
        if !is_training || self.group.size() == 1 {
            return self.norm.forward_t(x, is_training);
        }
        let state = NormState {
            weight: &self.weight,
            bias: &self.bias,
            running_mean: &self.norm.running_mean,
            running_var: &self.norm.running_var,
            momentum: self.config.momentum,
            eps: self.config.eps,
        };
        match sync_batch_norm(x, &state, &self.group, true) {
            Ok(output) => output,
            Err(error) => panic!("SyncBatchNorm over {}: {error}", self.group.name()),
        }
    }
}

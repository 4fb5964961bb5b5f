//! libtorch operators that `tch` does not bind: fused optimizer steps, `foreach` operations on lists of tensors,
//! norms and attention.

use tch::Tensor;

use crate::bridge::ffi;
use crate::error::{Result, TorchError};
use crate::ffi_tensor::{addresses, borrow, owned, unpacked};

/// Turns deterministic algorithms on or off in this process, like PyTorch's `use_deterministic_algorithms`: operators
/// without a deterministic implementation fail, and new memory is filled.
pub fn use_deterministic_algorithms(on: bool) -> Result<()> {
    Ok(ffi::use_deterministic_algorithms(on)?)
}

/// The hyperparameters of AdamW.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW {
    /// Learning rate.
    pub lr: f64,
    /// Decay rate of the first moment.
    pub beta1: f64,
    /// Decay rate of the second moment.
    pub beta2: f64,
    /// Added to the denominator for numerical stability.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
}

/// The tensors that AdamW reads and updates, one entry per parameter in each list.
#[derive(Debug)]
pub struct AdamWState<'a> {
    /// The parameters.
    pub params: &'a [Tensor],
    /// Their gradients.
    pub grads: &'a [Tensor],
    /// First moments.
    pub exp_avgs: &'a [Tensor],
    /// Second moments.
    pub exp_avg_sqs: &'a [Tensor],
    /// Numbers of steps so far, as f32 scalars; [`fused_adamw`] increments them.
    pub steps: &'a [Tensor],
}

/// What a fused kernel reads on the device before it updates parameters, as PyTorch's `GradScaler` passes it.
#[derive(Debug, Clone, Copy, Default)]
pub struct DeviceScalars<'a> {
    /// Gradients are divided by it, so that clipping needs no separate pass.
    pub grad_scale: Option<&'a Tensor>,
    /// A float32 scalar: if it is 1, nothing is updated.
    pub found_inf: Option<&'a Tensor>,
}

/// One step of AdamW over all parameters in one kernel.
pub fn fused_adamw(
    state: &AdamWState<'_>,
    options: &AdamW,
    scalars: DeviceScalars<'_>,
) -> Result<()> {
    Ok(ffi::fused_adamw(
        &addresses(state.params),
        &addresses(state.grads),
        &addresses(state.exp_avgs),
        &addresses(state.exp_avg_sqs),
        &addresses(state.steps),
        &addresses(scalars.grad_scale.as_slice()),
        &addresses(scalars.found_inf.as_slice()),
        options.lr,
        options.beta1,
        options.beta2,
        options.eps,
        options.weight_decay,
    )?)
}

/// The hyperparameters of SGD.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sgd {
    /// Learning rate.
    pub lr: f64,
    /// Momentum; 0 for none.
    pub momentum: f64,
    /// Dampening of the momentum.
    pub dampening: f64,
    /// L2 weight decay.
    pub weight_decay: f64,
    /// Nesterov momentum.
    pub nesterov: bool,
}

/// One step of SGD over all parameters; `momenta` may be empty if the momentum is 0.
pub fn fused_sgd(
    params: &[Tensor],
    grads: &[Tensor],
    momenta: &[Tensor],
    options: &Sgd,
    is_first_step: bool,
    scalars: DeviceScalars<'_>,
) -> Result<()> {
    Ok(ffi::fused_sgd(
        &addresses(params),
        &addresses(grads),
        &addresses(momenta),
        &addresses(scalars.grad_scale.as_slice()),
        &addresses(scalars.found_inf.as_slice()),
        options.lr,
        options.momentum,
        options.dampening,
        options.weight_decay,
        options.nesterov,
        is_first_step,
    )?)
}

/// The 2-norm of each tensor.
pub fn foreach_norm(tensors: &[Tensor]) -> Result<Vec<Tensor>> {
    unpacked(ffi::foreach_norm(&addresses(tensors))?)
}

/// The square root of each tensor.
pub fn foreach_sqrt(tensors: &[Tensor]) -> Result<Vec<Tensor>> {
    unpacked(ffi::foreach_sqrt(&addresses(tensors))?)
}

/// `t *= factor` for each.
pub fn foreach_mul_(tensors: &[Tensor], factor: f64) -> Result<()> {
    Ok(ffi::foreach_mul_scalar(&addresses(tensors), factor)?)
}

/// `t *= factor` for each, where the factor is a tensor that the host does not read.
pub fn foreach_mul_tensor_(tensors: &[Tensor], factor: &Tensor) -> Result<()> {
    Ok(ffi::foreach_mul_tensor(
        &addresses(tensors),
        borrow(factor),
    )?)
}

/// `t *= factor` for each, with one factor per tensor.
pub fn foreach_mul_list_(tensors: &[Tensor], factors: &[Tensor]) -> Result<()> {
    Ok(ffi::foreach_mul_list(
        &addresses(tensors),
        &addresses(factors),
    )?)
}

/// `t += alpha * other` for each.
pub fn foreach_add_(tensors: &[Tensor], others: &[Tensor], alpha: f64) -> Result<()> {
    Ok(ffi::foreach_add(
        &addresses(tensors),
        &addresses(others),
        alpha,
    )?)
}

/// `t += weight * (end - t)` for each.
pub fn foreach_lerp_(tensors: &[Tensor], ends: &[Tensor], weight: f64) -> Result<()> {
    Ok(ffi::foreach_lerp(
        &addresses(tensors),
        &addresses(ends),
        weight,
    )?)
}

/// `t += value * a * b` for each.
pub fn foreach_addcmul_(tensors: &[Tensor], a: &[Tensor], b: &[Tensor], value: f64) -> Result<()> {
    Ok(ffi::foreach_addcmul(
        &addresses(tensors),
        &addresses(a),
        &addresses(b),
        value,
    )?)
}

/// `t += value * a * b`, where `b` broadcasts to `a`.
pub fn addcmul_(tensor: &Tensor, a: &Tensor, b: &Tensor, value: f64) -> Result<()> {
    Ok(ffi::addcmul(borrow(tensor), borrow(a), borrow(b), value)?)
}

/// `t += value * a / b` for each.
pub fn foreach_addcdiv_(tensors: &[Tensor], a: &[Tensor], b: &[Tensor], value: f64) -> Result<()> {
    Ok(ffi::foreach_addcdiv(
        &addresses(tensors),
        &addresses(a),
        &addresses(b),
        value,
    )?)
}

/// `t = source` for each.
pub fn foreach_copy_(tensors: &[Tensor], sources: &[Tensor]) -> Result<()> {
    Ok(ffi::foreach_copy(&addresses(tensors), &addresses(sources))?)
}

/// `t = 0` for each.
pub fn foreach_zero_(tensors: &[Tensor]) -> Result<()> {
    Ok(ffi::foreach_zero(&addresses(tensors))?)
}

/// Root-mean-square norm over the last dims, times `weight`.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    Ok(owned(ffi::rms_norm(borrow(x), borrow(weight), eps)?))
}

/// Scaled dot-product attention on `[batch, heads, sequence, dim]`, without materializing the scores.
/// Keys and values may have fewer heads (GQA): query head `h` uses KV head `h / (heads / KV heads)`.
pub fn attention(q: &Tensor, k: &Tensor, v: &Tensor, causal: bool) -> Result<Tensor> {
    Ok(owned(ffi::attention(
        borrow(q),
        borrow(k),
        borrow(v),
        causal,
    )?))
}

/// The attention of queries to a block of their keys, on `[batch, heads, sequence, dim]`: the output, normalized over
/// these keys only, and the log-sum-exp of the scores, `[batch, heads, sequence]`.
pub fn attention_block(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    causal: bool,
) -> Result<(Tensor, Tensor)> {
    let found = ffi::attention_block(borrow(q), borrow(k), borrow(v), causal)?;
    match <[Tensor; 2]>::try_from(unpacked(found)?) {
        Ok([out, lse]) => Ok((out, lse)),
        Err(_) => Err(TorchError::Invalid(
            "attention_block: two results".to_owned(),
        )),
    }
}

/// The gradients of queries, keys and values of one block, given the output and the log-sum-exp over all keys.
pub fn attention_block_backward(
    gradient: &Tensor,
    (q, k, v): (&Tensor, &Tensor, &Tensor),
    (out, lse): (&Tensor, &Tensor),
    causal: bool,
) -> Result<[Tensor; 3]> {
    let found = ffi::attention_block_backward(
        borrow(gradient),
        borrow(q),
        borrow(k),
        borrow(v),
        borrow(out),
        borrow(lse),
        causal,
    )?;
    <[Tensor; 3]>::try_from(unpacked(found)?)
        .map_err(|_| TorchError::Invalid("attention_block_backward: three results".to_owned()))
}

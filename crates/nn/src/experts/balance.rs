//! Load-balancing losses of MoE layers, defined so that they do not depend on how a batch is divided over ranks.
//!
//! The auxiliary loss is per sequence, as in DeepSeek-V3:
//!
//! ```text
//!   coef · mean over sequences of  Σ_e  (E / (k·S) · n_e) · (1/S · Σ_t p_te)
//! ```
//!
//! where `n_e` is the number of the sequence's tokens that use expert `e`, and `p_te` is the normalized score of `e`
//! for token `t`. Given the `n_e`, which have no gradient, the loss is a sum over tokens. So ranks with different
//! sequences, and different micro-batches, just add up; ranks with tokens of the same sequences all-reduce the `n_e`
//! first. (A loss over the tokens of a batch would depend on the batch size per rank.) The router z-loss is a sum
//! over tokens.
//!
//! The model's loss may be computed on another rank, the last pipeline stage. So these losses are not added to it:
//! their gradients start in the layer, with the weight that the context provides.

use tch::{Kind, Tensor};
use trainyard_arch::{MoeConfig, ScoringFunc};
use trainyard_torch::{ReduceOp, autograd, meta};
use trainyard_trace::Purpose;

use super::ExpertParallel;
use super::count::count;
use super::router::Sequences;
use crate::{Context, NnError, Result};

/// The inputs of the losses.
pub(super) struct Losses<'a> {
    pub config: &'a MoeConfig,
    pub logits: &'a Tensor,
    pub scores: &'a Tensor,
}

impl Losses<'_> {
    /// All losses, summed over this rank's tokens; `chosen` [sequences, experts] counts the rows of each expert.
    pub(super) fn summed(
        &self,
        chosen: &Tensor,
        sequences: &Sequences,
        ep: &ExpertParallel,
        cx: &Context,
    ) -> Result<Option<Tensor>> {
        if !cx.training {
            return Ok(None);
        }
        let mut sum = None;
        if self.config.router_aux_loss_coef != 0.0 {
            sum = Some(self.imbalance(chosen, sequences, ep)?);
        }
        if self.config.router_z_loss_coef != 0.0 {
            let size = log_sum_exp(self.logits)?.f_square()?;
            let size = size.f_sum(size.kind())?;
            let size = size.f_mul_scalar(self.config.router_z_loss_coef)?;
            sum = Some(match sum {
                Some(sum) => sum.f_add(&size)?,
                None => size,
            });
        }
        Ok(sum)
    }

    fn imbalance(
        &self,
        chosen: &Tensor,
        sequences: &Sequences,
        ep: &ExpertParallel,
    ) -> Result<Tensor> {
        let chosen = chosen.f_zeros_like()?.f_add(chosen)?;
        if let Some(group) = ep.sequence_group() {
            let counting = group.all_reduce(&chosen, ReduceOp::Sum, Purpose::Control)?;
            counting.wait()?;
        }
        let MoeConfig {
            num_experts,
            num_experts_per_tok,
            ..
        } = self.config;
        let equal = (num_experts_per_tok * sequences.length as usize) as f64 / *num_experts as f64;
        let loads = chosen
            .f_to_kind(self.scores.kind())?
            .f_mul_scalar(self.config.router_aux_loss_coef / equal)?;
        let loads = loads.f_index_select(0, &sequences.of_token)?;
        let shares = match self.config.scoring_func {
            ScoringFunc::Softmax => self.scores.shallow_clone(),
            ScoringFunc::Sigmoid => {
                let sums = self
                    .scores
                    .f_sum_dim_intlist(-1i64, true, self.scores.kind())?;
                self.scores.f_div(&sums)?
            }
        };
        Ok(shares.f_mul(&loads)?.f_sum(shares.kind())?)
    }
}

/// The log-sum-exp of every row. (libtorch's `logsumexp` has no meta kernel.)
fn log_sum_exp(logits: &Tensor) -> Result<Tensor> {
    let largest = logits.f_detach()?.f_amax(-1i64, true)?;
    let sum = logits.f_sub(&largest)?.f_exp()?;
    let sum = sum.f_sum_dim_intlist(-1i64, true, sum.kind())?;
    Ok(sum.f_log()?.f_add(&largest)?)
}

/// The number of tokens of each sequence that chose each expert [sequences, experts].
pub(super) fn chosen(
    experts: &Tensor,
    sequences: &Sequences,
    num_experts: usize,
) -> Result<Tensor> {
    let number = num_experts as i64;
    if meta::is_meta(experts) {
        return Ok(meta::empty(&[sequences.count, number], Kind::Int64)?);
    }
    let pair_ids = pair_ids(experts, sequences, number)?;
    let counts = count(&pair_ids, sequences.count * number)?;
    Ok(counts.f_view([sequences.count, number])?)
}

/// The position of each row in the queue of its sequence and expert [tokens, chosen].
pub(super) fn position_in_expert(
    experts: &Tensor,
    sequences: &Sequences,
    num_experts: usize,
) -> Result<Tensor> {
    let pair_ids = pair_ids(experts, sequences, num_experts as i64)?;
    let (sorted, order) = pair_ids.f_sort_stable(true, 0, false)?;
    let number = sorted.size()[0];
    let positions = Tensor::f_arange(number, (Kind::Int64, sorted.device()))?;
    let counts = count(&pair_ids, sequences.count * num_experts as i64)?;
    let starts = counts.f_cumsum(0, Kind::Int64)?.f_sub(&counts)?;
    let position_in_expert = positions.f_sub(&starts.f_index_select(0, &sorted)?)?;
    let unsorted =
        position_in_expert
            .f_empty_like()?
            .f_index_copy(0, &order, &position_in_expert)?;
    Ok(unsorted.f_view_as(experts)?)
}

/// The id of the (sequence, expert) pair of every row.
fn pair_ids(experts: &Tensor, sequences: &Sequences, num_experts: i64) -> Result<Tensor> {
    let of_token = sequences.of_token.f_unsqueeze(1)?;
    let pair_ids = of_token.f_mul_scalar(num_experts)?.f_add(experts)?;
    Ok(pair_ids.f_reshape(-1i64)?)
}

/// Returns `output` unchanged; in backward, `losses` get the gradient that they would have as terms of the model's
/// loss.
pub(super) fn with_losses(
    output: &Tensor,
    losses: Option<&Tensor>,
    cx: &Context,
) -> Result<Tensor> {
    let Some(losses) = losses else {
        return Ok(output.shallow_clone());
    };
    let weight = cx.loss_weight.ok_or(NnError::MissingLossWeight)?;
    Ok(autograd::apply(
        &[output, losses],
        |saver, inputs| {
            saver.save(&inputs[1].f_ones_like()?.f_mul_scalar(weight)?);
            Ok(inputs[0].f_detach()?)
        },
        |saved, gradients| {
            let gradient = gradients[0].as_ref().map(Tensor::shallow_clone);
            Ok(vec![gradient, saved.first().map(Tensor::shallow_clone)])
        },
    )?)
}

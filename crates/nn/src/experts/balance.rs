//! What keeps experts equally busy, defined so that it is the same however a batch is divided.
//!
//! The auxiliary loss is that of each sequence for itself, as DeepSeek-V3 has it:
//!
//! ```text
//!   coef · mean over sequences of  Σ_e  (E / (k·S) · n_e) · (1/S · Σ_t p_te)
//! ```
//!
//! with `n_e` the tokens of the sequence that go to expert `e` and `p_te` the share of `e` in the scores
//! of token `t`. Given the `n_e`, which have no gradient, it is a sum over tokens. So ranks with
//! different sequences, and passes with different micro-batches, just add up; ranks that share
//! sequences add up the `n_e` first. (Over the tokens of a whole batch, as others have it, the loss would
//! depend on what a batch is.) The loss of large logits is a sum over tokens as it is.
//!
//! Layers are far from where the loss is computed, in a pipeline on other ranks. So these losses never
//! meet it: their gradients begin in the layer, with the weight that the context tells.

use tch::{Kind, Tensor};
use trainyard_torch::{ReduceOp, autograd, meta};
use trainyard_trace::Purpose;

use super::router::Sequences;
use super::{ExpertParallel, MoeConfig, Scoring};
use crate::{Context, NnError, Result};

/// What losses are made of.
pub(super) struct Losses<'a> {
    pub config: &'a MoeConfig,
    pub logits: &'a Tensor,
    pub scores: &'a Tensor,
}

impl Losses<'_> {
    /// All of them, summed over this rank's tokens; `chosen` is how often each expert was chosen
    /// [sequences, experts].
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
        if let Some(group) = ep.sharers() {
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
            Scoring::Softmax => self.scores.shallow_clone(),
            Scoring::Sigmoid => {
                let sums = self
                    .scores
                    .f_sum_dim_intlist(-1i64, true, self.scores.kind())?;
                self.scores.f_div(&sums)?
            }
        };
        Ok(shares.f_mul(&loads)?.f_sum(shares.kind())?)
    }
}

/// Of every row, with the largest taken out first. (libtorch's own has no kernel for dry runs.)
fn log_sum_exp(logits: &Tensor) -> Result<Tensor> {
    let largest = logits.f_detach()?.f_amax(-1i64, true)?;
    let sum = logits.f_sub(&largest)?.f_exp()?;
    let sum = sum.f_sum_dim_intlist(-1i64, true, sum.kind())?;
    Ok(sum.f_log()?.f_add(&largest)?)
}

/// How often each expert was chosen for tokens of each sequence [sequences, experts].
pub(super) fn chosen(
    experts: &Tensor,
    sequences: &Sequences,
    num_experts: usize,
) -> Result<Tensor> {
    let number = num_experts as i64;
    if meta::is_meta(experts) {
        return Ok(meta::empty(&[sequences.number, number], Kind::Int64)?);
    }
    let places = places(experts, sequences, number)?;
    let counts = places.f_bincount(None::<&Tensor>, sequences.number * number)?;
    Ok(counts.f_view([sequences.number, number])?)
}

/// How many rows of the same sequence and expert come before each [tokens, chosen].
pub(super) fn turns(experts: &Tensor, sequences: &Sequences, num_experts: usize) -> Result<Tensor> {
    let places = places(experts, sequences, num_experts as i64)?;
    let (sorted, order) = places.f_sort_stable(true, 0, false)?;
    let number = sorted.size()[0];
    let positions = Tensor::f_arange(number, (Kind::Int64, sorted.device()))?;
    let counts = places.f_bincount(None::<&Tensor>, 0)?;
    let starts = counts.f_cumsum(0, Kind::Int64)?.f_sub(&counts)?;
    let turns = positions.f_sub(&starts.f_index_select(0, &sorted)?)?;
    let unsorted = turns.f_empty_like()?.f_index_copy(0, &order, &turns)?;
    Ok(unsorted.f_view_as(experts)?)
}

/// A number for every pair of sequence and expert, for every row.
fn places(experts: &Tensor, sequences: &Sequences, num_experts: i64) -> Result<Tensor> {
    let of_token = sequences.of_token.f_unsqueeze(1)?;
    let places = of_token.f_mul_scalar(num_experts)?.f_add(experts)?;
    Ok(places.f_reshape(-1i64)?)
}

/// `output` as it is; in backward `losses` get the gradient they would have had as a part of the loss.
pub(super) fn with_losses(
    output: &Tensor,
    losses: Option<&Tensor>,
    cx: &Context,
) -> Result<Tensor> {
    let Some(losses) = losses else {
        return Ok(output.shallow_clone());
    };
    let weight = cx.loss_weight.ok_or(NnError::LossWeight)?;
    Ok(autograd::single(
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

//! The router: chooses the experts of each token.
//!
//! One matrix product scores all experts, and each token uses the top k. An optional bias changes which experts are
//! chosen but not their weights: it balances load without an auxiliary loss.

use tch::{Kind, Tensor};
use trainyard_arch::{GroupScore, MoeConfig, RoutingGroups, ScoringFunc};
use trainyard_torch::{device, meta};

use super::balance::{self, Losses};
use super::load::Counts;
use super::{ExpertLoad, ExpertParallel, SyntheticSkew};
use crate::loss::wide;
use crate::{Builder, Context, Init, Module, Parameter, Result, TensorParallel};

/// Keeps the division by a sum of scores finite.
const EPSILON: f64 = 1e-20;

/// Chooses the experts of each token.
#[derive(Module, Debug)]
pub struct Router {
    layer: usize,
    weight: Parameter,
    /// Added to the scores for choosing experts only.
    e_score_correction_bias: Option<Parameter>,
    #[module(skip)]
    config: MoeConfig,
    #[module(skip)]
    load: ExpertLoad,
}

/// The experts and weights that a router chose for some tokens.
pub(super) struct Routing {
    pub to: Destinations,
    /// [tokens, chosen], in the dtype of the tokens.
    pub weights: Tensor,
    /// The auxiliary losses, summed over tokens.
    pub losses: Option<Tensor>,
}

/// The destinations of rows: experts or nodes.
pub(super) struct Destinations {
    /// [tokens, chosen]: ids of destinations; `count` for a dropped row.
    pub ids: Tensor,
    /// The number of possible destinations.
    pub count: usize,
    /// Whether rows may be dropped.
    pub drops: bool,
    /// The expected number of rows per destination, where ids are not known: in dry runs and on simulated GPUs.
    pub expected: Vec<i64>,
}

/// The sequence of each token of this rank, and the length of sequences.
pub(super) struct Sequences {
    /// [tokens].
    pub of_token: Tensor,
    pub count: i64,
    /// Tokens of one sequence on all ranks.
    pub length: i64,
}

/// `preferred` [tokens, experts], but no preference for experts outside of a token's best groups.
fn within_best_groups(preferred: &Tensor, groups: &RoutingGroups) -> Result<Tensor> {
    let by_group = preferred.f_unflatten(-1, [groups.n_group as i64, -1])?;
    let number = match groups.score {
        GroupScore::Best => 1,
        GroupScore::BestTwo => 2,
    };
    let best = by_group.f_topk(number, -1, true, false)?.0;
    let scores = best.f_sum_dim_intlist(-1i64, true, best.kind())?;
    let (_, chosen) = scores.f_topk(groups.topk_group as i64, -2, true, false)?;
    let excluded = scores.f_ones_like()?.f_to_kind(Kind::Bool)?;
    let excluded = excluded.f_scatter_value(-2, &chosen, 0)?;
    let masked = by_group.f_masked_fill(&excluded, f64::NEG_INFINITY)?;
    Ok(masked.f_flatten(-2, -1)?)
}

impl Router {
    pub(super) fn build(
        builder: &Builder,
        layer: usize,
        width: usize,
        config: &MoeConfig,
        init: Init,
    ) -> Result<Router> {
        let number = config.num_experts;
        let bias = config.bias_update_rate;
        let bias = bias.map(|_| builder.buffer("e_score_correction_bias", &[number], Init::Zeros));
        Ok(Router {
            layer,
            weight: builder.positionwise("weight", &[number, width], init)?,
            e_score_correction_bias: bias.transpose()?,
            config: config.clone(),
            load: ExpertLoad::default(),
        })
    }

    /// The index of the router's block in the model.
    pub fn layer(&self) -> usize {
        self.layer
    }

    /// The number of rows per expert in the last step.
    pub fn load(&self) -> &ExpertLoad {
        &self.load
    }

    /// The number of experts of the layer.
    pub fn num_experts(&self) -> usize {
        self.config.num_experts
    }

    /// Whether a bias balances the expert load.
    pub fn has_bias(&self) -> bool {
        self.e_score_correction_bias.is_some()
    }

    /// Updates the bias towards experts with less than a balanced load; `counts` `[experts]` are the rows per expert
    /// in a step, summed over all ranks.
    pub fn update_bias(&self, counts: &Tensor) -> Result<()> {
        let (Some(bias), Some(rate)) =
            (&self.e_score_correction_bias, self.config.bias_update_rate)
        else {
            return Ok(());
        };
        tch::no_grad(|| {
            let counts = counts.f_to_kind(wide(bias.kind()))?;
            let missing = counts.f_mean(counts.kind())?.f_sub(&counts)?;
            let step = missing.f_sign()?.f_mul_scalar(rate)?;
            let _ = bias.tensor().shallow_clone().f_add_(&step)?;
            Ok(())
        })
    }

    /// Routes `rows` [tokens, width] of a batch of `num_sequences`.
    pub(super) fn forward(
        &self,
        rows: &Tensor,
        num_sequences: i64,
        tp: &TensorParallel,
        ep: &ExpertParallel,
        cx: &Context,
    ) -> Result<Routing> {
        let logits = rows.f_linear(&self.weight.value()?, None::<&Tensor>)?;
        let logits = logits.f_to_kind(wide(logits.kind()))?;
        let scores = match self.config.scoring_func {
            ScoringFunc::Softmax => logits.f_softmax(-1, None::<Kind>)?,
            ScoringFunc::Sigmoid => logits.f_sigmoid()?,
        };
        let experts = self.top_k_experts(&scores, ep.synthetic_skew())?;
        let weights = self.weights(&scores, &experts)?;
        let sequences = Sequences::new(rows, num_sequences, tp, ep)?;
        let chosen = balance::chosen(&experts, &sequences, self.num_experts())?;
        let placed = match self.config.capacity_factor {
            Some(factor) => self.apply_capacity(&experts, &sequences, factor)?,
            None => experts,
        };
        let counts = Counts {
            chosen: chosen.f_sum_dim_intlist(0i64, false, Kind::Int64)?,
            dropped: self.dropped(&placed)?,
        };
        self.load.record(counts, cx);
        let losses = Losses {
            config: &self.config,
            logits: &logits,
            scores: &scores,
        };
        Ok(Routing {
            losses: losses.summed(&chosen, &sequences, ep, cx)?,
            weights: weights.f_to_kind(rows.kind())?,
            to: Destinations {
                expected: if meta::is_meta(&placed) || !device::computes_values() {
                    ep.synthetic_skew()
                        .counts(placed.numel() as i64, self.num_experts())
                } else {
                    Vec::new()
                },
                ids: placed,
                count: self.num_experts(),
                drops: self.config.capacity_factor.is_some(),
            },
        })
    }

    /// The top-k experts of every token [tokens, chosen].
    fn top_k_experts(&self, scores: &Tensor, synthetic_skew: SyntheticSkew) -> Result<Tensor> {
        tch::no_grad(|| {
            let mut preferred = match &self.e_score_correction_bias {
                Some(bias) => scores.f_add(&bias.tensor().f_to_kind(scores.kind())?)?,
                None => scores.shallow_clone(),
            };
            if let Some(preference) = synthetic_skew.preference(scores)? {
                preferred = preferred.f_add(&preference)?;
            }
            if let Some(groups) = &self.config.groups {
                preferred = within_best_groups(&preferred, groups)?;
            }
            let number = self.config.num_experts_per_tok as i64;
            Ok(preferred.f_topk(number, -1, true, true)?.1)
        })
    }

    fn weights(&self, scores: &Tensor, experts: &Tensor) -> Result<Tensor> {
        let mut weights = scores.f_gather(-1, experts, false)?;
        if self.config.norm_topk_prob {
            let sum = weights.f_sum_dim_intlist(-1i64, true, weights.kind())?;
            weights = weights.f_div(&sum.f_add_scalar(EPSILON)?)?;
        }
        match self.config.routed_scaling_factor {
            1.0 => Ok(weights),
            factor => Ok(weights.f_mul_scalar(factor)?),
        }
    }

    /// Applies the capacity limit: of every sequence, an expert accepts the first rows up to its capacity; the rest
    /// are dropped.
    fn apply_capacity(
        &self,
        experts: &Tensor,
        sequences: &Sequences,
        factor: f64,
    ) -> Result<Tensor> {
        let (all, chosen) = (
            self.num_experts() as f64,
            self.config.num_experts_per_tok as f64,
        );
        let capacity = (factor * chosen * sequences.length as f64 / all).ceil() as i64;
        if meta::is_meta(experts) {
            return Ok(experts.shallow_clone());
        }
        let position_in_expert =
            balance::position_in_expert(experts, sequences, self.num_experts())?;
        let is_dropped = position_in_expert.f_ge(capacity)?;
        Ok(experts.f_masked_fill(&is_dropped, self.num_experts() as i64)?)
    }
}

impl Router {
    /// The number of dropped rows [1]; `None` without a capacity limit.
    fn dropped(&self, placed: &Tensor) -> Result<Option<Tensor>> {
        if self.config.capacity_factor.is_none() {
            return Ok(None);
        }
        let is_dropped = placed.f_eq(self.num_experts() as i64)?;
        Ok(Some(is_dropped.f_sum(Kind::Int64)?.f_view(1)?))
    }
}

impl Sequences {
    /// The sequences of `rows`. Tensor-parallel ranks have ranges of their common tokens, sequence after sequence;
    /// context-parallel ranks have other tokens of the same sequences.
    fn new(
        rows: &Tensor,
        count: i64,
        tp: &TensorParallel,
        ep: &ExpertParallel,
    ) -> Result<Sequences> {
        let num_rows = rows.size()[0];
        let num_shards = match tp.sequence_group() {
            Some(group) => group.size() as i64,
            None => 1,
        };
        let num_sharers = ep.sequence_group().map_or(1, |group| group.size() as i64);
        let tokens_per_sequence = num_rows * num_shards / count.max(1);
        let first_row = tp.index() as i64 * num_rows * i64::from(num_shards > 1);
        Ok(Sequences {
            of_token: if meta::is_meta(rows) {
                meta::empty(&[num_rows], Kind::Int64)?
            } else {
                let options = (Kind::Int64, rows.device());
                Tensor::f_arange_start(first_row, first_row + num_rows, options)?
                    .f_floor_divide_scalar(tokens_per_sequence.max(1))?
            },
            count,
            length: num_rows * num_sharers.max(num_shards) / count.max(1),
        })
    }
}

//! Which experts a token goes to.
//!
//! The scores of all experts come from one product; the best few are chosen. A bias, where there is one,
//! moves the choice and not the weights: it is what balances without a loss.

use tch::{Kind, Tensor};
use trainyard_torch::meta;

use super::balance::{self, Losses};
use super::load::Counts;
use super::{ExpertParallel, Load, MoeConfig, Scoring, Spread};
use crate::loss::wide;
use crate::{Builder, Context, Init, Module, Parameter, Result, TensorParallel};

/// Keeps the division by a sum of scores finite.
const SMALL: f64 = 1e-20;

/// Sends tokens to experts.
#[derive(Module, Debug)]
pub struct Router {
    layer: usize,
    weight: Parameter,
    /// Added to scores where experts are chosen.
    e_score_correction_bias: Option<Parameter>,
    #[module(skip)]
    config: MoeConfig,
    #[module(skip)]
    load: Load,
}

/// What a router has chosen for some tokens.
pub(super) struct Choice {
    pub to: Destinations,
    /// [tokens, chosen], in the kind of the tokens.
    pub weights: Tensor,
    /// What is added to the loss, summed over tokens.
    pub losses: Option<Tensor>,
}

/// Where the rows of some tokens go: to experts, or to machines.
pub(super) struct Destinations {
    /// [tokens, chosen]: numbers of destinations; that after the last for what goes nowhere.
    pub numbers: Tensor,
    /// How many there are to choose from.
    pub number: usize,
    /// Whether some rows may go nowhere.
    pub drops: bool,
    /// Rows that each gets, where numbers are not known: in a dry run.
    pub expected: Vec<i64>,
}

/// Which sequence each token of this rank is of, and how long those are.
pub(super) struct Sequences {
    /// [tokens].
    pub of_token: Tensor,
    pub number: i64,
    /// Tokens of one, on all ranks.
    pub length: i64,
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
            load: Load::default(),
        })
    }

    /// Which block of the model it is in, from zero.
    pub fn layer(&self) -> usize {
        self.layer
    }

    /// What share of the experts a token goes to.
    pub fn chosen_share(&self) -> f64 {
        self.config.num_experts_per_tok as f64 / self.config.num_experts as f64
    }

    /// How many rows experts got.
    pub fn load(&self) -> &Load {
        &self.load
    }

    /// Experts of the layer.
    pub fn num_experts(&self) -> usize {
        self.config.num_experts
    }

    /// Whether the choice is balanced by a bias.
    pub fn has_bias(&self) -> bool {
        self.e_score_correction_bias.is_some()
    }

    /// Prefers experts that had less than an equal load in a step of which all ranks together had
    /// `counts` rows `[experts]`, and the others less.
    pub fn rebalance(&self, counts: &Tensor) -> Result<()> {
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

    /// The choice for `rows` [tokens, width] of a batch of `num_sequences`.
    pub(super) fn forward(
        &self,
        rows: &Tensor,
        num_sequences: i64,
        tp: &TensorParallel,
        ep: &ExpertParallel,
        cx: &Context,
    ) -> Result<Choice> {
        let logits = rows.f_linear(&self.weight.value()?, None::<&Tensor>)?;
        let logits = logits.f_to_kind(wide(logits.kind()))?;
        let scores = match self.config.scoring_func {
            Scoring::Softmax => logits.f_softmax(-1, None::<Kind>)?,
            Scoring::Sigmoid => logits.f_sigmoid()?,
        };
        let experts = self.chosen(&scores, ep.spread())?;
        let weights = self.weights(&scores, &experts)?;
        let sequences = Sequences::new(rows, num_sequences, tp, ep)?;
        let chosen = balance::chosen(&experts, &sequences, self.num_experts())?;
        let placed = match self.config.capacity_factor {
            Some(factor) => self.with_room(&experts, &sequences, factor)?,
            None => experts,
        };
        let counts = Counts {
            chosen: chosen.f_sum_dim_intlist(0i64, false, Kind::Int64)?,
            dropped: self.dropped(&placed)?,
        };
        self.load.note(counts, cx);
        let losses = Losses {
            config: &self.config,
            logits: &logits,
            scores: &scores,
        };
        Ok(Choice {
            losses: losses.summed(&chosen, &sequences, ep, cx)?,
            weights: weights.f_to_kind(rows.kind())?,
            to: Destinations {
                expected: match meta::is_meta(&placed) {
                    true => ep
                        .spread()
                        .counts(placed.numel() as i64, self.num_experts()),
                    false => Vec::new(),
                },
                numbers: placed,
                number: self.num_experts(),
                drops: self.config.capacity_factor.is_some(),
            },
        })
    }

    /// The best experts of every token [tokens, chosen].
    fn chosen(&self, scores: &Tensor, spread: Spread) -> Result<Tensor> {
        tch::no_grad(|| {
            let mut preferred = match &self.e_score_correction_bias {
                Some(bias) => scores.f_add(&bias.tensor().f_to_kind(scores.kind())?)?,
                None => scores.shallow_clone(),
            };
            if let Some(preference) = spread.preference(scores)? {
                preferred = preferred.f_add(&preference)?;
            }
            let number = self.config.num_experts_per_tok as i64;
            Ok(preferred.f_topk(number, -1, true, true)?.1)
        })
    }

    fn weights(&self, scores: &Tensor, experts: &Tensor) -> Result<Tensor> {
        let mut weights = scores.f_gather(-1, experts, false)?;
        if self.config.norm_topk_prob {
            let sum = weights.f_sum_dim_intlist(-1i64, true, weights.kind())?;
            weights = weights.f_div(&sum.f_add_scalar(SMALL)?)?;
        }
        match self.config.routed_scaling_factor {
            1.0 => Ok(weights),
            factor => Ok(weights.f_mul_scalar(factor)?),
        }
    }

    /// The same experts where they have room: of every sequence, an expert takes the first that come.
    fn with_room(&self, experts: &Tensor, sequences: &Sequences, factor: f64) -> Result<Tensor> {
        let (all, chosen) = (
            self.num_experts() as f64,
            self.config.num_experts_per_tok as f64,
        );
        let room = (factor * chosen * sequences.length as f64 / all).ceil() as i64;
        if meta::is_meta(experts) {
            return Ok(experts.shallow_clone());
        }
        let turns = balance::turns(experts, sequences, self.num_experts())?;
        let is_late = turns.f_ge(room)?;
        Ok(experts.f_masked_fill(&is_late, self.num_experts() as i64)?)
    }
}

impl Router {
    /// How many rows go to no expert [1]; none where all have room for all.
    fn dropped(&self, placed: &Tensor) -> Result<Option<Tensor>> {
        if self.config.capacity_factor.is_none() {
            return Ok(None);
        }
        let nowhere = placed.f_eq(self.num_experts() as i64)?;
        Ok(Some(nowhere.f_sum(Kind::Int64)?.f_view(1)?))
    }
}

impl Sequences {
    /// Of `rows`: an interval of the tokens that tensor-parallel ranks have together, sequence after
    /// sequence; of which context-parallel ranks have other parts.
    fn new(
        rows: &Tensor,
        number: i64,
        tp: &TensorParallel,
        ep: &ExpertParallel,
    ) -> Result<Sequences> {
        let num_rows = rows.size()[0];
        let parts = match tp.sequence_group() {
            Some(group) => group.size() as i64,
            None => 1,
        };
        let sharers = ep.sharers().map_or(1, |group| group.size() as i64);
        let here = num_rows * parts / number.max(1);
        let before = tp.index() as i64 * num_rows * i64::from(parts > 1);
        let indices: Vec<i64> = (before..before + num_rows)
            .map(|row| row / here.max(1))
            .collect();
        Ok(Sequences {
            of_token: match meta::is_meta(rows) {
                true => meta::empty(&[num_rows], Kind::Int64)?,
                false => Tensor::f_from_slice(&indices)?.f_to_device(rows.device())?,
            },
            number,
            length: num_rows * sharers.max(parts) / number.max(1),
        })
    }
}

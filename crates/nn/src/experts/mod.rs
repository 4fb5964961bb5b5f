//! A mixture of experts: many feed-forward parts, of which every token goes through a few.
//!
//! ```text
//!   tokens ─▶ router ─▶ sorted by expert ─▶ dispatch ─▶ experts ─▶ combine ─▶ weighted sums
//!      └────────────────────▶ shared experts (while rows travel back) ─────────────▲
//! ```
//!
//! - [`router`]: which experts each token goes to, and with what weight.
//! - [`route`]: the order of rows by expert, and how many rows each expert gets.
//! - [`exchange`]: rows to the ranks that have their experts, and back.
//! - [`machines`]: the same in two steps, where those ranks are on several machines.
//! - [`grouped`]: the products of each expert with its rows, all experts' in one call.
//! - [`balance`]: what keeps experts equally busy.
//!
//! The weights of all experts of a layer are one parameter each, an expert after the other along the
//! first dimension, as Hugging Face's models hold them; ranks of `ep` have some experts each. An expert
//! without a row still has a gradient, of zeros, and a rank without rows still takes part in everything.

mod balance;
mod exchange;
mod grouped;
mod load;
mod machines;
mod parallel;
mod route;
mod router;

use tch::Tensor;
use trainyard_torch::Group;

use crate::layers::SwiGlu;
use crate::{Builder, Context, Init, Module, NnError, Parameter, Result, TensorParallel};

pub use load::Load;
pub use parallel::{ExpertParallel, Spread};
pub use router::Router;

use exchange::Exchange;
use route::Route;
use router::Destinations;

/// How the scores of experts are made from logits.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub enum Scoring {
    /// They add up to one.
    #[default]
    Softmax,
    /// Each for itself.
    Sigmoid,
}

/// A mixture's sizes and choices, under the keys of Hugging Face's `config.json` where it has them.
#[derive(Clone, Debug, PartialEq)]
pub struct MoeConfig {
    /// Experts of a layer.
    pub num_experts: usize,
    /// Experts each token goes to.
    pub num_experts_per_tok: usize,
    /// Elements of a position inside an expert.
    pub moe_intermediate_size: usize,
    /// Experts that every token goes through, as one of their width together.
    pub n_shared_experts: usize,
    /// Blocks at the beginning that have a dense feed-forward part.
    pub first_k_dense_replace: usize,
    /// How scores are made.
    pub scoring_func: Scoring,
    /// Whether a token's weights are divided by their sum.
    pub norm_topk_prob: bool,
    /// What weights are multiplied by.
    pub routed_scaling_factor: f64,
    /// The weight of the loss that punishes unequal loads; none if zero.
    pub router_aux_loss_coef: f64,
    /// The weight of the loss that keeps logits small; none if zero.
    pub router_z_loss_coef: f64,
    /// How far a step moves the bias by which experts with little load are preferred; no bias if absent.
    pub bias_update_rate: Option<f64>,
    /// Rows an expert takes of a sequence, in shares of an equal load; all that come if absent.
    pub capacity_factor: Option<f64>,
}

impl MoeConfig {
    /// Refuses what no mixture can have.
    pub fn validate(&self) -> Result<()> {
        let refuse = |reason: String| {
            Err(NnError::Sizes {
                model: "mixture of experts",
                reason,
            })
        };
        let (all, chosen) = (self.num_experts, self.num_experts_per_tok);
        if chosen == 0 || chosen > all {
            return refuse(format!(
                "num_experts_per_tok ({chosen}) must be 1 to num_experts ({all})"
            ));
        }
        if self.moe_intermediate_size == 0 {
            return refuse("moe_intermediate_size must be 1 or more".to_owned());
        }
        Ok(())
    }
}

/// The feed-forward part of a block as a mixture.
#[derive(Module, Debug)]
pub struct MixtureOfExperts {
    gate: Router,
    experts: Experts,
    shared_experts: Option<SwiGlu>,
    #[module(skip)]
    ep: ExpertParallel,
    #[module(skip)]
    tp: TensorParallel,
}

impl MixtureOfExperts {
    /// From `width` and back, in block `layer` of a model.
    pub fn build(
        builder: &Builder,
        layer: usize,
        width: usize,
        config: &MoeConfig,
        init: Init,
    ) -> Result<MixtureOfExperts> {
        config.validate()?;
        let tp = builder.tensor_parallel();
        if tp.size() > 1 && tp.sequence_group().is_none() {
            return Err(NnError::WholeSequences);
        }
        let inner = config.moe_intermediate_size;
        let shared = config.n_shared_experts * inner;
        let shared =
            (shared > 0).then(|| SwiGlu::build(&builder.at("shared_experts"), width, shared, init));
        Ok(MixtureOfExperts {
            gate: Router::build(&builder.at("gate"), layer, width, config, init)?,
            experts: Experts::build(&builder.at("experts"), width, config, init)?,
            shared_experts: shared.transpose()?,
            ep: builder.expert_parallel(),
            tp,
        })
    }

    /// What sends tokens to experts.
    pub fn router(&self) -> &Router {
        &self.gate
    }

    /// The output for `x` [batch, positions, width], of which ranks that share sequences have an
    /// interval of the batch's tokens each.
    pub fn forward(&self, x: &Tensor, cx: &Context) -> Result<Tensor> {
        let rows = crate::weight_gradients::flat(x)?;
        let choice = self
            .gate
            .forward(&rows, x.size()[0], &self.tp, &self.ep, cx)?;
        // Runs while rows travel: here back to their tokens, and in backward their gradients to the experts.
        let mut shared = None;
        let mut meanwhile = || {
            shared = self.shared_experts.as_ref().map(|shared| shared.forward(x));
        };
        let combined = match self.ep.machines() {
            None => self.routed(
                &rows,
                &choice.to,
                &choice.weights,
                self.ep.group(),
                meanwhile,
            )?,
            Some(machines) => {
                let arrived = machines.dispatch(&rows, &choice)?;
                let (to, weights) = (&arrived.to, &arrived.weights);
                let sums = self.routed(&arrived.rows, to, weights, machines.within(), || {})?;
                let returning = arrived.start_combine(&sums)?;
                meanwhile();
                arrived.combined(&returning.finish()?)?
            }
        };
        let mut output = combined.f_view_as(x)?;
        if let Some(shared) = shared {
            output = output.f_add(&shared?)?;
        }
        balance::with_losses(&output, choice.losses.as_ref(), cx)
    }

    /// For each of `rows` [tokens, width] the weighted sum of what its experts, which are on the ranks of
    /// `group`, make of it.
    fn routed(
        &self,
        rows: &Tensor,
        to: &Destinations,
        weights: &Tensor,
        group: Option<&Group>,
        meanwhile: impl FnOnce(),
    ) -> Result<Tensor> {
        let route = Route::new(to)?;
        let exchange = Exchange::new(group, &route.counts, rows)?;
        let dispatched = exchange.dispatch(&route.sorted(rows)?)?;
        let computed = self
            .experts
            .forward(&dispatched, &exchange.rows_of_experts())?;
        let returning = exchange.start_combine(&computed)?;
        meanwhile();
        route.combined(&returning.finish()?, weights)
    }
}

/// The weights of this rank's experts.
#[derive(Module, Debug)]
struct Experts {
    /// [experts, 2 · inner, width]: the gate's rows, then the others.
    gate_up_proj: Parameter,
    /// [experts, width, inner].
    down_proj: Parameter,
}

impl Experts {
    fn build(builder: &Builder, width: usize, config: &MoeConfig, init: Init) -> Result<Experts> {
        let (number, inner) = (config.num_experts, config.moe_intermediate_size);
        Ok(Experts {
            gate_up_proj: builder.experts("gate_up_proj", &[number, 2 * inner, width], init)?,
            down_proj: builder.experts("down_proj", &[number, width, inner], init)?,
        })
    }

    /// `down(silu(gate(x)) · up(x))` of every expert for its rows, which follow each other.
    fn forward(&self, x: &Tensor, num_rows: &[i64]) -> Result<Tensor> {
        let both = grouped::products(x, &self.gate_up_proj.value()?, num_rows)?;
        let halves = both.f_chunk(2, 1)?;
        let inner = halves[0].f_silu()?.f_mul(&halves[1])?;
        grouped::products(&inner, &self.down_proj.value()?, num_rows)
    }
}

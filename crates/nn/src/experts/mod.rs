//! Mixture of experts (MoE): a feed-forward layer of many experts, of which every token uses a few.
//!
//! ```text
//!   tokens ─▶ router ─▶ permute by expert ─▶ dispatch ─▶ experts ─▶ combine ─▶ weighted sums
//!      └────────────────────▶ shared experts (while combine is in flight) ───────────▲
//! ```
//!
//! - [`router`]: chooses the experts of each token and their weights.
//! - [`permutation`]: sorts rows by expert, and counts the rows of each expert.
//! - [`dispatcher`]: sends rows to the ranks that have their experts, and back.
//! - [`hierarchical`]: the same in two steps, if the expert-parallel ranks are on several nodes.
//! - [`expert_layer`]: what experts compute, for experts of one's own.
//! - [`gated`]: experts that are gated MLPs.
//! - [`grouped`]: grouped GEMM, the products of each expert with its rows.
//! - [`balance`]: load-balancing losses.
//!
//! The weights of all experts of a layer are one parameter each, with the experts along dim 0, as in Hugging Face
//! models; expert-parallel ranks have some experts each. An expert without rows has a gradient of zeros, and a rank
//! without rows still takes part in every collective.

mod balance;
mod count;
mod dispatcher;
mod expert_layer;
mod gated;
mod grouped;
mod hierarchical;
mod load;
mod parallel;
mod permutation;
mod router;

use tch::Tensor;
use trainyard_arch::{Activation, MoeConfig};
use trainyard_torch::Group;

use crate::layers::GatedMlp;
use crate::{Builder, Context, Init, Module, NnError, Result, TensorParallel};

pub use expert_layer::{Experts, for_each_expert};
pub use load::ExpertLoad;
pub use parallel::{ExpertParallel, SyntheticSkew};
pub use router::Router;

use dispatcher::TokenDispatcher;
use gated::GatedExperts;
use permutation::TokenPermutation;
use router::Destinations;

/// The MoE feed-forward layer of a block.
#[derive(Module, Debug)]
pub struct MixtureOfExperts {
    gate: Router,
    experts: Box<dyn Experts>,
    shared_experts: Option<GatedMlp>,
    #[module(skip)]
    ep: ExpertParallel,
    #[module(skip)]
    tp: TensorParallel,
}

impl MixtureOfExperts {
    /// Builds the layer with hidden size `width` for block `layer` of a model. Its experts are gated MLPs.
    pub fn build(
        builder: &Builder,
        layer: usize,
        width: usize,
        config: &MoeConfig,
        init: Init,
    ) -> Result<MixtureOfExperts> {
        let experts = GatedExperts::build(&builder.push("experts"), width, config, init)?;
        MixtureOfExperts::with_experts(builder, layer, width, config, init, Box::new(experts))
    }

    /// The same with experts of one's own, built for the same ranks.
    pub fn with_experts(
        builder: &Builder,
        layer: usize,
        width: usize,
        config: &MoeConfig,
        init: Init,
        experts: Box<dyn Experts>,
    ) -> Result<MixtureOfExperts> {
        config.check()?;
        let tp = builder.tensor_parallel();
        if tp.size() > 1 && tp.sequence_group().is_none() {
            return Err(NnError::MoeNeedsSequenceParallel);
        }
        let shared = config.shared_width();
        let shared = (shared > 0).then(|| {
            GatedMlp::build(
                &builder.push("shared_experts"),
                width,
                shared,
                Activation::Silu,
                init,
            )
        });
        Ok(MixtureOfExperts {
            gate: Router::build(&builder.push("gate"), layer, width, config, init)?,
            experts,
            shared_experts: shared.transpose()?,
            ep: builder.expert_parallel(),
            tp,
        })
    }

    /// The router of the layer.
    pub fn router(&self) -> &Router {
        &self.gate
    }

    /// The output for `x` [batch, positions, width]; with sequence parallelism, each rank has a range of the batch's
    /// tokens.
    pub fn forward(&self, x: &Tensor, cx: &Context) -> Result<Tensor> {
        let rows = crate::weight_gradients::flat(x)?;
        let routing = self
            .gate
            .forward(&rows, x.size()[0], &self.tp, &self.ep, cx)?;
        // Runs while combine is in flight, and in backward while gradients are sent to the experts.
        let mut shared = None;
        let mut run_shared = || {
            shared = self.shared_experts.as_ref().map(|shared| shared.forward(x));
        };
        let combined = match self.ep.hierarchical_dispatcher() {
            None => self.routed(
                &rows,
                &routing.to,
                &routing.weights,
                self.ep.group(),
                run_shared,
            )?,
            Some(dispatcher) => {
                let arrived = dispatcher.dispatch(&rows, &routing)?;
                let (to, weights) = (&arrived.to, &arrived.weights);
                let sums = self.routed(&arrived.rows, to, weights, dispatcher.within(), || {})?;
                let pending = arrived.start_combine(&sums)?;
                run_shared();
                arrived.unpermute(&pending.finish()?)?
            }
        };
        let mut output = combined.f_view_as(x)?;
        if let Some(shared) = shared {
            output = output.f_add(&shared?)?;
        }
        balance::with_losses(&output, routing.losses.as_ref(), cx)
    }

    /// For each of `rows` [tokens, width], the weighted sum of the outputs of its experts, which are on the ranks of
    /// `group`.
    fn routed(
        &self,
        rows: &Tensor,
        to: &Destinations,
        weights: &Tensor,
        group: Option<&Group>,
        meanwhile: impl FnOnce(),
    ) -> Result<Tensor> {
        let permutation = TokenPermutation::new(to)?;
        let dispatcher = TokenDispatcher::new(group, &permutation.counts)?;
        let dispatched = dispatcher.dispatch(&permutation.permute(rows)?)?;
        let computed = self
            .experts
            .forward(&dispatched, &dispatcher.rows_per_expert())?;
        let pending = dispatcher.start_combine(&computed)?;
        meanwhile();
        permutation.unpermute_weighted(&pending.finish()?, weights)
    }
}

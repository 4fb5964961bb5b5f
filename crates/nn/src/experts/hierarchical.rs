//! Hierarchical token dispatch in two steps, for experts on several nodes.
//!
//! Links within a node are faster than links between nodes. So a token is sent to each node once, however many of its
//! experts are there, to the rank with the same local index; that rank sends it to the ranks with its experts. On the
//! way back, that rank sums the weighted outputs of those experts and returns one row. With `k` experts per token
//! spread over `m` nodes, `m (1 - (1 - 1/m)^k)` rows are sent between nodes instead of `k`, in each direction.

use tch::{Kind, Tensor};
use trainyard_torch::{Group, meta};

use super::dispatcher::{PendingCombine, TokenDispatcher};
use super::permutation::TokenPermutation;
use super::router::{Destinations, Routing};
use crate::Result;

/// Dispatches tokens first across nodes and then within a node. Clones share the groups.
#[derive(Clone)]
pub(super) struct HierarchicalDispatcher {
    within: Option<Group>,
    across: Group,
}

/// Tokens that arrived at this node.
pub(super) struct ArrivedTokens {
    /// [tokens, width].
    pub rows: Tensor,
    /// The experts of this node that the tokens use.
    pub to: Destinations,
    /// [tokens, chosen]; includes the weights of experts on other nodes, which are not used here.
    pub weights: Tensor,
    permutation: TokenPermutation,
    dispatcher: TokenDispatcher,
}

impl HierarchicalDispatcher {
    pub(super) fn new(within: &Group, across: &Group) -> HierarchicalDispatcher {
        HierarchicalDispatcher {
            within: (within.size() > 1).then(|| within.clone()),
            across: across.clone(),
        }
    }

    /// The ranks of this node, if there are several.
    pub(super) fn within(&self) -> Option<&Group> {
        self.within.as_ref()
    }

    /// Sends tokens to the nodes that have their experts, and receives tokens.
    pub(super) fn dispatch(&self, rows: &Tensor, routing: &Routing) -> Result<ArrivedTokens> {
        let nodes = self.destinations(&routing.to)?;
        let permutation = TokenPermutation::new(&nodes)?;
        let dispatcher = TokenDispatcher::new(Some(&self.across), &permutation.counts)?;
        let weights = dispatcher.dispatch(&permutation.permute(&routing.weights)?)?;
        let ids = tch::no_grad(|| {
            dispatcher.dispatch_metadata(&permutation.permute_metadata(&routing.to.ids)?)
        })?;
        Ok(ArrivedTokens {
            rows: dispatcher.dispatch(&permutation.permute(rows)?)?,
            to: self.local_destinations(&routing.to, ids)?,
            weights,
            permutation,
            dispatcher,
        })
    }

    /// The nodes of each token's experts, each node once.
    fn destinations(&self, to: &Destinations) -> Result<Destinations> {
        let count = self.across.size();
        let each = to.count / count;
        if meta::is_meta(&to.ids) {
            let (num_tokens, chosen) = to.ids.size2()?;
            return Ok(Destinations {
                ids: to.ids.shallow_clone(),
                count,
                drops: true,
                expected: expected_tokens(&to.expected, count, num_tokens, chosen),
            });
        }
        tch::no_grad(|| {
            // A dropped row, which has no expert, goes to no node.
            let node = to.ids.f_floor_divide_scalar(each as i64)?;
            let same = node.f_unsqueeze(2)?.f_eq_tensor(&node.f_unsqueeze(1)?)?;
            let is_repeated = same
                .f_to_kind(Kind::Uint8)?
                .f_tril(-1)?
                .f_amax(2i64, false)?;
            let is_repeated = is_repeated.f_to_kind(Kind::Bool)?;
            Ok(Destinations {
                ids: node.f_masked_fill(&is_repeated, count as i64)?,
                count,
                drops: true,
                expected: Vec::new(),
            })
        })
    }

    /// The experts of this node that the arrived tokens use, from the `ids` of all experts.
    fn local_destinations(&self, to: &Destinations, ids: Tensor) -> Result<Destinations> {
        let count = to.count / self.across.size();
        let first = self.across.index() * count;
        let (ids, expected) = if meta::is_meta(&ids) {
            // A dry run assumes that every sending rank is like this one.

            let own = to.expected[first..first + count].iter();
            (
                ids,
                own.map(|rows| rows * self.across.size() as i64).collect(),
            )
        } else {
            tch::no_grad(|| {
                let own = ids.f_sub_scalar(first as i64)?;
                let is_elsewhere = own.f_lt(0)?.f_logical_or(&own.f_ge(count as i64)?)?;
                let own = own.f_masked_fill(&is_elsewhere, count as i64)?;
                Ok::<_, tch::TchError>((own, Vec::new()))
            })?
        };
        Ok(Destinations {
            ids,
            count,
            drops: true,
            expected,
        })
    }
}

impl ArrivedTokens {
    /// Starts to send back the sums over this node's experts.
    pub(super) fn start_combine(&self, sums: &Tensor) -> Result<PendingCombine> {
        self.dispatcher.start_combine(sums)
    }

    /// For each of this rank's tokens, the sum of the rows that nodes returned.
    pub(super) fn unpermute(&self, returned: &Tensor) -> Result<Tensor> {
        self.permutation.unpermute_sum(returned)
    }
}

/// The expected count of tokens that go to each node, of `num_tokens` with `chosen` experts each, if experts get the
/// given rows and choices are independent.
fn expected_tokens(rows: &[i64], num_nodes: usize, num_tokens: i64, chosen: i64) -> Vec<i64> {
    let total = rows.iter().sum::<i64>().max(1) as f64;
    let of_node = |rows: &[i64]| {
        let share = rows.iter().sum::<i64>() as f64 / total;
        let is_chosen = 1.0 - (1.0 - share).powi(chosen as i32);
        (num_tokens as f64 * is_chosen).round() as i64
    };
    let each = rows.len() / num_nodes;
    rows.chunks(each.max(1)).map(of_node).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_sent_to_a_node_once() {
        // Two of four experts on two nodes: three of four tokens go to either.
        assert_eq!(expected_tokens(&[50, 50, 50, 50], 2, 100, 2), [75, 75]);
        // All tokens use experts of the first node.
        assert_eq!(expected_tokens(&[100, 100, 0, 0], 2, 100, 2), [100, 0]);
        // One expert per token: hierarchical dispatch saves nothing.
        assert_eq!(expected_tokens(&[25; 4], 4, 100, 1), [25; 4]);
    }
}

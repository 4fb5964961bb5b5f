//! Tied embeddings: a table that the first and the last stage use, on different ranks.
//!
//! Both ranks hold a replica and train it. They sum its gradients once per step, so the replicas stay bitwise equal.

use tch::Tensor;
use trainyard_nn::Parameter;
use trainyard_torch::{Group, P2pOp};
use trainyard_trace::Purpose;

use crate::error::Result;

/// A tag that messages between stages do not use.
const TAG: u16 = u16::MAX;

/// This rank's replica of a tied embedding table.
pub struct TiedEmbedding {
    parameter: Parameter,
    /// The rank with the other replica.
    peer: usize,
    is_owner: bool,
}

impl TiedEmbedding {
    /// A replica on this rank of a table that `peer` holds too. Exactly one of both owns it, which decides which
    /// rank counts and saves it.
    pub fn new(parameter: Parameter, peer: usize, is_owner: bool) -> TiedEmbedding {
        TiedEmbedding {
            parameter,
            peer,
            is_owner,
        }
    }

    /// The table, if the other rank owns it.
    pub fn replica(&self) -> Option<&Parameter> {
        (!self.is_owner).then_some(&self.parameter)
    }

    /// Bytes that both ranks together send in a step.
    pub(super) fn sent(&self) -> u64 {
        let tensor = self.parameter.tensor();
        2 * (tensor.numel() * tensor.kind().elt_size_in_bytes()) as u64
    }

    /// Sums the gradients of both replicas.
    pub(super) fn all_reduce(&self, group: &Group) -> Result<()> {
        let Some(mut own) = self.parameter.gradient()? else {
            return Ok(());
        };
        let other = own.f_empty_like()?;
        let ops = [P2pOp::Send(&own, self.peer), P2pOp::Recv(&other, self.peer)];
        group
            .batch_send_recv(&ops, TAG, Purpose::Gradient)?
            .wait()?;
        // In the same order on both ranks, so that the sums are bitwise equal.
        tch::no_grad(|| -> Result<()> {
            let sum: Tensor = if self.is_owner {
                own.f_add(&other)?
            } else {
                other.f_add(&own)?
            };
            own.f_copy_(&sum)?;
            Ok(())
        })
    }
}

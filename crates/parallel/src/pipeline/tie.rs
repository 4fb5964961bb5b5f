//! A table that the first stage and the last compute with, on different ranks.
//!
//! Both hold a copy and train it. Their gradients are added up once a step, so the copies stay equal
//! to the bit.

use tch::Tensor;
use trainyard_nn::Parameter;
use trainyard_torch::{Group, Message};
use trainyard_trace::Purpose;

use crate::error::Result;

/// Beyond the numbers of messages between stages.
const TAG: u16 = u16::MAX;

/// This rank's copy of a table.
pub struct Tie {
    parameter: Parameter,
    /// The rank with the other copy.
    peer: usize,
    is_owner: bool,
}

impl Tie {
    /// A copy on this rank of a table of which `peer` has one too. One of both owns it.
    pub fn new(parameter: Parameter, peer: usize, is_owner: bool) -> Tie {
        Tie {
            parameter,
            peer,
            is_owner,
        }
    }

    /// The table, where the other rank owns it.
    pub fn copy(&self) -> Option<&Parameter> {
        (!self.is_owner).then_some(&self.parameter)
    }

    /// Bytes both ranks send in a step.
    pub(super) fn sent(&self) -> u64 {
        let tensor = self.parameter.tensor();
        2 * (tensor.numel() * tensor.kind().elt_size_in_bytes()) as u64
    }

    /// Both gradients become their sum.
    pub(super) fn add_up(&self, group: &Group) -> Result<()> {
        let Some(mut own) = self.parameter.gradient()? else {
            return Ok(());
        };
        let other = own.f_empty_like()?;
        let messages = [
            Message::Send(&own, self.peer),
            Message::Recv(&other, self.peer),
        ];
        group.batch(&messages, TAG, Purpose::Gradient)?.wait()?;
        // In one order on both, so that the sums have the same bits.
        tch::no_grad(|| -> Result<()> {
            let sum: Tensor = match self.is_owner {
                true => own.f_add(&other)?,
                false => other.f_add(&own)?,
            };
            own.f_copy_(&sum)?;
            Ok(())
        })
    }
}

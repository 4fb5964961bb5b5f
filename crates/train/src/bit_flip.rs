//! Flips a bit of this rank's memory in one step, to test that it is found: `debug.flip_bit`.

use tch::{Kind, Tensor};
use trainyard_config::{BitFlip, DebugSection};
use trainyard_nn::Parameter;

use crate::Result;

/// A bit to flip.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlannedBitFlip {
    target: BitFlip,
    step: u64,
}

impl PlannedBitFlip {
    /// The flip that the config plans for this rank.
    pub(crate) fn from_config(section: &DebugSection, rank: usize) -> Option<PlannedBitFlip> {
        let target = section.flip_bit?;
        let is_here = section.flip_bit_rank == rank;
        is_here.then_some(PlannedBitFlip {
            target,
            step: section.flip_bit_step,
        })
    }

    /// Whether the flip is in the past after `step`, so that a job that goes back does not repeat it.
    pub(crate) fn is_past(&self, step: u64) -> bool {
        self.step <= step
    }

    /// Before the update of `step`, when gradients are reduced.
    pub(crate) fn before_update(&self, step: u64, parameters: &[Parameter]) -> Result<()> {
        if self.target == BitFlip::Gradient
            && self.step == step
            && let Some(last) = parameters.last()
            && let Some(gradient) = last.gradient()?
        {
            flip(&gradient)?;
        }
        Ok(())
    }

    /// After the update of `step`.
    pub(crate) fn after_update(
        &self,
        step: u64,
        parameters: &[Parameter],
        states: &[(String, Tensor)],
    ) -> Result<()> {
        if self.step != step {
            return Ok(());
        }
        match self.target {
            BitFlip::Parameter => parameters.last().map_or(Ok(()), |p| flip(p.tensor())),
            BitFlip::State => states.first().map_or(Ok(()), |(_, state)| flip(state)),
            BitFlip::Gradient => Ok(()),
        }
    }
}

/// Flips a bit of the mantissa of the first element.
fn flip(tensor: &Tensor) -> Result<()> {
    let (bits, mask) = match tensor.kind() {
        Kind::Double => (Kind::Int64, 1i64 << 40),
        Kind::Float => (Kind::Int, 1 << 20),
        _ => (Kind::Int16, 1 << 5),
    };
    tch::no_grad(|| {
        let elements = tensor.f_detach()?.f_view_dtype(bits)?.f_reshape(-1)?;
        let mut first = elements.f_narrow(0, 0, 1)?;
        let _ = first.f_bitwise_xor_(mask)?;
        Ok(())
    })
}

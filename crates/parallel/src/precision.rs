//! Mixed precision of a strategy.

use tch::{Kind, Tensor};

use crate::error::Result;

/// The types of computation, gradient reduction and output, as FSDP's `MixedPrecisionPolicy`. Absent types are those
/// of the master weights, which the optimizer always updates.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Precision {
    /// The type in which layers compute and parameters are gathered.
    pub param: Option<Kind>,
    /// The type in which gradients are reduced.
    pub reduce: Option<Kind>,
    /// The type that the model's output is cast to.
    pub output: Option<Kind>,
}

impl Precision {
    /// Computes in float16 and reduces gradients in float32. The loss must be scaled, or small gradients become zero.
    pub fn fp16() -> Precision {
        Precision {
            param: Some(Kind::Half),
            ..Precision::bf16()
        }
    }

    /// Computes in bfloat16 and reduces gradients in float32, which loses no gradient to rounding.
    pub fn bf16() -> Precision {
        Precision {
            param: Some(Kind::BFloat16),
            reduce: Some(Kind::Float),
            output: None,
        }
    }

    /// A model's input in the type in which layers compute.
    pub(crate) fn cast_input(&self, x: &Tensor) -> Result<Tensor> {
        match self.param {
            Some(kind) => cast_floating(x, kind),
            None => Ok(x.shallow_clone()),
        }
    }
}

/// Floating-point inputs in another type; indices, such as tokens, stay as they are.
pub fn cast_floating(x: &Tensor, kind: Kind) -> Result<Tensor> {
    Ok(if x.is_floating_point() {
        x.f_to_kind(kind)?
    } else {
        x.shallow_clone()
    })
}

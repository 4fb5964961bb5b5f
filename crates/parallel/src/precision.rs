//! Mixed precision of a strategy.

use tch::Kind;

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
    /// Computes in bfloat16 and reduces gradients in float32, which loses no gradient to rounding.
    pub fn bf16() -> Precision {
        Precision {
            param: Some(Kind::BFloat16),
            reduce: Some(Kind::Float),
            output: None,
        }
    }
}

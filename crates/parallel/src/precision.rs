//! Which number types a strategy uses where.

use tch::Kind;

/// Types of what is computed, reduced and put out; absent means that of the master weights, which the
/// optimiser always works on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Precision {
    /// What layers compute in, and parameters travel in.
    pub param: Option<Kind>,
    /// What gradients travel and are summed in.
    pub reduce: Option<Kind>,
    /// What the model's output is cast to.
    pub output: Option<Kind>,
}

impl Precision {
    /// Computes in bfloat16 and reduces in single precision, which loses no gradient to rounding.
    pub fn bf16() -> Precision {
        Precision {
            param: Some(Kind::BFloat16),
            reduce: Some(Kind::Float),
            output: None,
        }
    }
}

//! Local updates: what a rank keeps for the outer steps.

/// Bytes of one number of the outer loop, which is in float32.
pub const OUTER_WIDTH: u64 = 4;

/// What the outer loop keeps of every parameter of a rank, beside the outer parameters and the outer gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OuterStates {
    /// Whether the outer optimizer has a momentum.
    pub has_momentum: bool,
    /// Whether what is not sent is kept for the next outer step: error feedback.
    pub keeps_errors: bool,
}

impl OuterStates {
    /// Bytes for `num_parameters` parameters of a rank.
    pub fn bytes(self, num_parameters: u64) -> u64 {
        let num_states = 2 + u64::from(self.has_momentum) + u64::from(self.keeps_errors);
        OUTER_WIDTH * num_states * num_parameters
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn diloco_keeps_twelve_bytes_of_a_parameter() {
        let diloco = OuterStates {
            has_momentum: true,
            keeps_errors: false,
        };
        assert_eq!(diloco.bytes(1), 12);
        let with_errors = OuterStates {
            keeps_errors: true,
            ..diloco
        };
        assert_eq!(with_errors.bytes(1), 16);
    }
}

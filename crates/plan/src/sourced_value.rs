//! A number with its provenance.
//!
//! A plan is only as good as its inputs, so every input records whether it was measured, comes from a vendor's
//! specification, or is an assumption.

use std::fmt;

/// How a number is known.
#[derive(Copy, Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Basis {
    /// A measurement.
    Measured,
    /// A vendor's specification.
    Specified,
    /// An assumption, for want of a source.
    Assumed,
}

impl fmt::Display for Basis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Basis::Measured => "measured",
            Basis::Specified => "specified",
            Basis::Assumed => "assumed",
        })
    }
}

/// A number, how it is known, and its source.
#[derive(Clone, Debug, PartialEq)]
pub struct SourcedValue {
    /// The value in base units: bytes, seconds, operations, or any of them per second.
    pub value: f64,
    /// How it is known.
    pub basis: Basis,
    /// Where the number comes from.
    pub source: String,
}

impl SourcedValue {
    /// A measured value.
    pub fn measured(value: f64, source: impl Into<String>) -> SourcedValue {
        SourcedValue::new(value, Basis::Measured, source)
    }

    /// A value from a vendor's specification.
    pub fn specified(value: f64, source: impl Into<String>) -> SourcedValue {
        SourcedValue::new(value, Basis::Specified, source)
    }

    /// An assumed value, with the reason.
    pub fn assumed(value: f64, reason: impl Into<String>) -> SourcedValue {
        SourcedValue::new(value, Basis::Assumed, reason)
    }

    fn new(value: f64, basis: Basis, source: impl Into<String>) -> SourcedValue {
        SourcedValue {
            value,
            basis,
            source: source.into(),
        }
    }
}

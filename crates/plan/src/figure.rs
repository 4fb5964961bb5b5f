//! A number together with how it is known.
//!
//! A plan is as good as the numbers it is made of, so none travels without saying whether somebody
//! measured it, a vendor states it, or nobody knows and it is assumed.

use std::fmt;

/// How a number is known.
#[derive(Copy, Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Basis {
    /// Somebody measured it.
    Measured,
    /// Its vendor states it.
    Specified,
    /// Nobody says; it is taken to be so.
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

/// A number, how it is known and from where.
#[derive(Clone, Debug, PartialEq)]
pub struct Figure {
    /// In basic units: bytes, seconds, operations, or of them per second.
    pub value: f64,
    /// How it is known.
    pub basis: Basis,
    /// Who says so.
    pub source: String,
}

impl Figure {
    /// A number somebody measured.
    pub fn measured(value: f64, source: impl Into<String>) -> Figure {
        Figure::new(value, Basis::Measured, source)
    }

    /// A number its vendor states.
    pub fn specified(value: f64, source: impl Into<String>) -> Figure {
        Figure::new(value, Basis::Specified, source)
    }

    /// A number that is taken to be so.
    pub fn assumed(value: f64, reason: impl Into<String>) -> Figure {
        Figure::new(value, Basis::Assumed, reason)
    }

    fn new(value: f64, basis: Basis, source: impl Into<String>) -> Figure {
        Figure {
            value,
            basis,
            source: source.into(),
        }
    }
}

//! `[parameter_server]`: workers that push gradients to servers instead of exchanging them.

use std::fmt::{self, Display, Formatter};

use documented::DocumentedFields;
use serde::{Deserialize, Serialize};

/// How many steps ahead of the oldest incomplete step a worker may be: a number of TOML, which may be `inf`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "f64", into = "f64")]
pub enum Staleness {
    /// At most this many. With 0, training is synchronous.
    Bounded(u64),
    /// There is no bound.
    Unbounded,
}

impl Staleness {
    /// The bound, if there is one.
    pub fn bound(self) -> Option<u64> {
        match self {
            Staleness::Bounded(bound) => Some(bound),
            Staleness::Unbounded => None,
        }
    }
}

impl Display for Staleness {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Staleness::Bounded(bound) => write!(f, "{bound}"),
            Staleness::Unbounded => f.write_str("inf"),
        }
    }
}

impl TryFrom<f64> for Staleness {
    type Error = String;

    fn try_from(number: f64) -> Result<Staleness, String> {
        const MAX: f64 = 1e9;
        if number == f64::INFINITY {
            return Ok(Staleness::Unbounded);
        }
        if (0.0..=MAX).contains(&number) && number.fract() == 0.0 {
            return Ok(Staleness::Bounded(number as u64));
        }
        Err("a staleness is a number of steps, or inf".to_owned())
    }
}

impl From<Staleness> for f64 {
    fn from(staleness: Staleness) -> f64 {
        staleness
            .bound()
            .map_or(f64::INFINITY, |bound| bound as f64)
    }
}

/// `[parameter_server]`, for runs that are started by `trainyard run --servers`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, DocumentedFields)]
#[serde(default, deny_unknown_fields)]
pub struct ParameterServerSection {
    /// How many steps ahead of the oldest incomplete step a worker may be. With 0, training is synchronous.
    pub staleness: Staleness,
    /// Whether the learning rate of a gradient is divided by the number of updates since its parameters were pulled.
    pub staleness_aware_lr: bool,
    /// Whether workers pull the parameters of their next gradient while they compute the one before. That hides the transfer, and
    /// makes gradients about twice as old.
    pub prefetch: bool,
    /// Whether faster workers compute larger parts of a step.
    pub balance_batches: bool,
    /// How long a worker tries to reach servers that do not answer, and how long servers wait for a first worker.
    pub reconnect_timeout_seconds: u64,
}

impl Default for ParameterServerSection {
    fn default() -> Self {
        ParameterServerSection {
            staleness: Staleness::Bounded(4),
            staleness_aware_lr: false,
            prefetch: false,
            balance_batches: false,
            reconnect_timeout_seconds: 300,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Config;

    #[test]
    fn a_staleness_is_a_number_or_infinite() {
        for (text, expected) in [
            ("0", Staleness::Bounded(0)),
            ("4", Staleness::Bounded(4)),
            ("inf", Staleness::Unbounded),
        ] {
            let parsed = Config::parse(&format!("parameter_server.staleness = {text}"), &[]);
            let parsed = parsed.unwrap();
            assert_eq!(parsed.parameter_server.staleness, expected);
            let again = Config::parse(&parsed.to_toml().unwrap(), &[]).unwrap();
            assert_eq!(again, parsed);
        }
        for text in ["-1", "1.5", "\"many\""] {
            let parsed = Config::parse(&format!("parameter_server.staleness = {text}"), &[]);
            assert!(parsed.is_err(), "{text}");
        }
        let overridden = ["--parameter_server.staleness", "inf"].map(str::to_owned);
        let parsed = Config::parse("", &overridden).unwrap();
        assert_eq!(parsed.parameter_server.staleness, Staleness::Unbounded);
    }
}

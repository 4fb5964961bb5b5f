//! Sites: groups of nodes that a slow network joins.
//!
//! A site is where a replica of the model can be trained without waiting for the slow network. Usually it is a data center;
//! in a cluster whose nodes are joined by Ethernet, it is one node.

use crate::{ClusterError, SourcedValue};

/// Equal sites, and the network between them.
#[derive(Clone, Debug, PartialEq)]
pub struct Sites {
    /// The number of sites.
    pub num_sites: usize,
    /// Bandwidth from one site to the others, per direction, in bytes per second.
    pub bandwidth: SourcedValue,
    /// Seconds of a round trip between two sites.
    pub round_trip: SourcedValue,
}

/// The round trip that is assumed where none is given: that of two sites about 2,000 km apart.
const ASSUMED_ROUND_TRIP_MS: f64 = 30.0;

impl Sites {
    /// Sites with this many Gb/s between them and this round trip in milliseconds.
    ///
    /// # Errors
    /// There are no sites, or a figure is not positive.
    pub fn new(
        num_sites: usize,
        gbit_s: f64,
        round_trip_ms: Option<f64>,
    ) -> Result<Sites, ClusterError> {
        if num_sites < 2 {
            return Err(ClusterError::Count {
                key: "sites",
                value: num_sites,
                least: 2,
                limit: MAX_SITES,
            });
        }
        let figures = [
            ("site_gbit_s", Some(gbit_s)),
            ("site_round_trip_ms", round_trip_ms),
        ];
        for (key, value) in figures {
            if let Some(value) = value.filter(|value| !(value.is_finite() && *value > 0.0)) {
                let key = key.to_owned();
                return Err(ClusterError::NotPositive { key, value });
            }
        }
        let source = "the description of the cluster";
        Ok(Sites {
            num_sites,
            bandwidth: SourcedValue::specified(gbit_s * GBIT, source),
            round_trip: match round_trip_ms {
                Some(ms) => SourcedValue::specified(ms * MS, source),
                None => SourcedValue::assumed(
                    ASSUMED_ROUND_TRIP_MS * MS,
                    "two sites about 2,000 km apart",
                ),
            },
        })
    }

    /// The bandwidth in Gb/s.
    pub fn gbit_s(&self) -> f64 {
        self.bandwidth.value / GBIT
    }

    pub(crate) fn set_gbit_s(&mut self, gbit_s: f64) {
        self.bandwidth.value = gbit_s * GBIT;
    }

    /// The round trip in milliseconds.
    pub fn round_trip_ms(&self) -> f64 {
        self.round_trip.value / MS
    }

    /// Parses the part of a short form after the `@`, as in `10Gb/s,30ms`. The round trip may be missing.
    pub(crate) fn parse(num_sites: usize, text: &str) -> Option<Result<Sites, ClusterError>> {
        let (bandwidth, round_trip) = match text.split_once(',') {
            Some((bandwidth, round_trip)) => (bandwidth, Some(round_trip)),
            None => (text, None),
        };
        let bandwidth = bandwidth.trim();
        let units = ["Gb/s", "Gbit/s", "Gbps"];
        let number = units
            .iter()
            .find_map(|unit| bandwidth.strip_suffix(unit))?
            .trim()
            .parse()
            .ok()?;
        let round_trip = match round_trip {
            Some(text) => Some(text.trim().strip_suffix("ms")?.trim().parse().ok()?),
            None => None,
        };
        Some(Sites::new(num_sites, number, round_trip))
    }
}

/// The largest accepted number of sites.
pub(crate) const MAX_SITES: usize = 1 << 10;

/// Bytes per second in one Gb/s.
pub(crate) const GBIT: f64 = 1e9 / 8.0;

const MS: f64 = 1e-3;

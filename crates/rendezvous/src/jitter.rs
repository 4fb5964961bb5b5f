//! Retry delays that differ between agents, so that they do not all reconnect at the same moment, and that are
//! reproducible for one agent, so that a simulation can be repeated.

use std::time::Duration;

/// A source of random delays, seeded by an agent's instance.
#[derive(Clone, Debug)]
pub struct Jitter(u64);

impl Jitter {
    pub fn new(instance: u64) -> Jitter {
        Jitter(instance)
    }

    /// A random delay between half of and one and a half times `delay`.
    pub fn around(&mut self, delay: Duration) -> Duration {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        let fraction = f64::from((z >> 32) as u32) / f64::from(u32::MAX);
        delay.mul_f64(0.5 + fraction)
    }
}

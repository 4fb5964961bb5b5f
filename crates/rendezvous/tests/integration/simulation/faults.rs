//! A seeded random number generator, and the schedule of faults that it generates.

use std::collections::BTreeSet;
use std::time::Duration;

/// SplitMix64: small, and the same on every platform.
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Rng {
        Rng(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0xD1B5_4A32_D192_ED03)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    pub fn one_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    pub fn millis(&mut self, from: u64, to: u64) -> Duration {
        Duration::from_millis(from + self.below(to - from + 1))
    }
}

/// A fault, or the end of one. Nodes are numbered; the decider, a server or etcd, is the last.
#[derive(Clone, Copy, Debug)]
pub enum Fault {
    Partition {
        from: usize,
        to: usize,
    },
    Heal {
        from: usize,
        to: usize,
    },
    Crash(usize),
    Restart(usize),
    /// Pauses a node, as swapping or the migration of a virtual machine does.
    Freeze(usize),
    Thaw(usize),
    /// A worker of this node fails.
    Fail(usize),
}

/// Faults between 3 s and `until`, after which none is left, in the order of time.
pub fn faults(rng: &mut Rng, num_agents: usize, until: Duration) -> Vec<(Duration, Fault)> {
    let decider = num_agents;
    let all = num_agents as u64 + 1;
    let mut faults = Vec::new();
    for _ in 0..4 + rng.below(10) {
        let at = rng.millis(3000, until.as_millis() as u64 - 1000);
        let end = (at + rng.millis(100, 12_000)).min(until);
        let mut both = |begin, finish| {
            faults.push((at, begin));
            faults.push((end, finish));
        };
        let node = rng.below(all) as usize;
        let agent = rng.below(num_agents as u64) as usize;
        match rng.below(12) {
            // Between an agent and the decider: one way, the other way, or both ways.
            kind @ 0..=3 => {
                if kind != 1 {
                    both(
                        Fault::Partition {
                            from: agent,
                            to: decider,
                        },
                        Fault::Heal {
                            from: agent,
                            to: decider,
                        },
                    );
                }
                if kind != 0 {
                    both(
                        Fault::Partition {
                            from: decider,
                            to: agent,
                        },
                        Fault::Heal {
                            from: decider,
                            to: agent,
                        },
                    );
                }
            }
            // Between two random halves, with the decider in either.
            4 | 5 => {
                let side: BTreeSet<usize> = (0..=num_agents).filter(|_| rng.one_in(2)).collect();
                for from in 0..=num_agents {
                    for to in 0..=num_agents {
                        if side.contains(&from) != side.contains(&to) {
                            both(Fault::Partition { from, to }, Fault::Heal { from, to });
                        }
                    }
                }
            }
            6..=8 => both(Fault::Crash(node), Fault::Restart(node)),
            9 | 10 => both(Fault::Freeze(node), Fault::Thaw(node)),
            _ => faults.push((at, Fault::Fail(agent))),
        }
    }
    faults.sort_by_key(|&(at, _)| at);
    faults
}

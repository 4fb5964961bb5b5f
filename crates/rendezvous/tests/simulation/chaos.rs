//! Seeded chance, and the faults it brings.

use std::collections::BTreeSet;
use std::time::Duration;

/// SplitMix64: small, seeded, and the same everywhere.
pub struct Chance(u64);

impl Chance {
    pub fn new(seed: u64) -> Chance {
        Chance(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0xD1B5_4A32_D192_ED03)
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

/// Something that goes wrong, or right again. Machines are numbered; the one that decides is the last.
#[derive(Clone, Copy, Debug)]
pub enum Fault {
    Cut {
        from: usize,
        to: usize,
    },
    Mend {
        from: usize,
        to: usize,
    },
    Crash(usize),
    Restart(usize),
    /// Stands still, as a machine that swaps or a virtual machine that is moved.
    Freeze(usize),
    Thaw(usize),
    /// A worker of this machine fails.
    Fail(usize),
}

/// Faults between 3 s and `until`, after which everything works; in the order of time.
pub fn faults(chance: &mut Chance, num_agents: usize, until: Duration) -> Vec<(Duration, Fault)> {
    let hub = num_agents;
    let all = num_agents as u64 + 1;
    let mut faults = Vec::new();
    for _ in 0..4 + chance.below(10) {
        let at = chance.millis(3000, until.as_millis() as u64 - 1000);
        let end = (at + chance.millis(100, 12_000)).min(until);
        let mut both = |begin, finish| {
            faults.push((at, begin));
            faults.push((end, finish));
        };
        let who = chance.below(all) as usize;
        let agent = chance.below(num_agents as u64) as usize;
        match chance.below(12) {
            // An agent and whoever decides: one way, the other way, both ways.
            kind @ 0..=3 => {
                if kind != 1 {
                    both(
                        Fault::Cut {
                            from: agent,
                            to: hub,
                        },
                        Fault::Mend {
                            from: agent,
                            to: hub,
                        },
                    );
                }
                if kind != 0 {
                    both(
                        Fault::Cut {
                            from: hub,
                            to: agent,
                        },
                        Fault::Mend {
                            from: hub,
                            to: agent,
                        },
                    );
                }
            }
            // Half of everybody, whoever decides on either side.
            4 | 5 => {
                let side: BTreeSet<usize> = (0..=num_agents).filter(|_| chance.one_in(2)).collect();
                for from in 0..=num_agents {
                    for to in 0..=num_agents {
                        if side.contains(&from) != side.contains(&to) {
                            both(Fault::Cut { from, to }, Fault::Mend { from, to });
                        }
                    }
                }
            }
            6..=8 => both(Fault::Crash(who), Fault::Restart(who)),
            9 | 10 => both(Fault::Freeze(who), Fault::Thaw(who)),
            _ => faults.push((at, Fault::Fail(agent))),
        }
    }
    faults.sort_by_key(|&(at, _)| at);
    faults
}

//! The value guard: a step whose loss or gradient norm is not finite changes no parameter, and every rank learns of
//! it.
//!
//! The update is prevented on the device: the optimizer's kernels read a flag that is computed from the norm of the
//! global gradient. The host reads loss and norm of a step later, when they have arrived, so the guard adds no
//! synchronization. Ranks agree on what they saw before they act on it.

use std::collections::VecDeque;
use std::ops::Range;

use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};
use trainyard_torch::Group;

use crate::Result;
use crate::agreement::gather;
use crate::late_values::LateValues;

/// A step with values that are not finite, as all ranks agree.
#[derive(Clone, Debug, PartialEq)]
pub struct Incident {
    /// The step, counted from 1.
    pub step: u64,
    /// The positions of its samples in the stream of samples.
    pub samples: Range<u64>,
    /// Norm of the global gradient.
    pub grad_norm: f64,
    /// The ranks whose own loss was not finite; empty if only gradients overflowed.
    pub ranks: Vec<usize>,
}

/// What a rank observed in a step.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Observation {
    pub(crate) step: u64,
    pub(crate) samples: Range<u64>,
    pub(crate) local_loss: f64,
    pub(crate) grad_norm: f64,
}

/// A step whose values may still be on the device.
struct Pending {
    step: u64,
    samples: Range<u64>,
    values: LateValues,
}

/// The part of the guard that a checkpoint saves.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GuardState {
    /// Incidents since the first step.
    pub num_incidents: u64,
    /// Positions in the stream of samples that are left out.
    pub skipped_samples: Vec<Range<u64>>,
}

impl GuardState {
    /// The first position at or after `position` that is not left out.
    pub(crate) fn next_sample(&self, position: u64) -> u64 {
        let skipped = |position: u64| {
            self.skipped_samples
                .iter()
                .find(|range| range.contains(&position))
        };
        let mut position = position;
        while let Some(range) = skipped(position) {
            position = range.end;
        }
        position
    }
}

/// Watches the values of every step on one rank.
pub(crate) struct ValueGuard {
    world: Group,
    pending: VecDeque<Pending>,
    /// Observations that are not finite and that the ranks have not agreed on yet.
    suspects: Vec<Observation>,
    pub(crate) state: GuardState,
}

impl ValueGuard {
    pub(crate) fn new(world: Group) -> ValueGuard {
        ValueGuard {
            world,
            pending: VecDeque::new(),
            suspects: Vec::new(),
            state: GuardState::default(),
        }
    }

    /// Starts to read the values of a step.
    pub(crate) fn watch(
        &mut self,
        step: u64,
        samples: Range<u64>,
        local_loss: &Tensor,
        grad_norm: &Tensor,
    ) -> Result<()> {
        self.pending.push_back(Pending {
            step,
            samples,
            values: LateValues::copy(&[local_loss, grad_norm])?,
        });
        Ok(())
    }

    /// The values of all steps but the last `num_unread`. Blocks the host until they have arrived.
    pub(crate) fn read_all_but(&mut self, num_unread: usize) -> Result<Vec<Observation>> {
        let num = self.pending.len().saturating_sub(num_unread);
        let read = |pending: Pending| {
            let values = pending.values.read()?;
            Ok(Observation {
                step: pending.step,
                samples: pending.samples,
                local_loss: values[0],
                grad_norm: values[1],
            })
        };
        self.pending.drain(..num).map(read).collect()
    }

    /// Remembers an observation that is not usable, until the ranks have agreed.
    pub(crate) fn suspect(&mut self, observation: Observation) {
        self.suspects.push(observation);
    }

    /// Whether this rank has seen a step that the ranks have not agreed on.
    pub(crate) fn has_suspects(&self) -> bool {
        !self.suspects.is_empty()
    }

    /// The steps that any rank suspects, oldest first. This is a collective call; all values must have been read.
    pub(crate) fn agree(&mut self) -> Result<Vec<Incident>> {
        let mut incidents = Vec::new();
        while let Some(incident) = self.agree_on_first()? {
            self.suspects.retain(|suspect| suspect.step > incident.step);
            incidents.push(incident);
        }
        Ok(incidents)
    }

    fn agree_on_first(&mut self) -> Result<Option<Incident>> {
        let row = match self.suspects.first() {
            Some(suspect) => [
                suspect.step as i64,
                suspect.samples.start as i64,
                suspect.samples.end as i64,
                suspect.grad_norm.to_bits() as i64,
                i64::from(!suspect.local_loss.is_finite()),
            ],
            None => [0; ROW],
        };
        let all = gather(&self.world, &row)?;
        let (rows, _) = all.as_chunks::<ROW>();
        Ok(first_incident(rows))
    }
}

/// What ranks exchange to agree: step, first and last sample, the bits of the norm, whether the loss is not finite.
const ROW: usize = 5;

/// The oldest step that a rank suspects; a row per rank, of which step 0 means none.
fn first_incident(rows: &[[i64; ROW]]) -> Option<Incident> {
    let suspecting = rows.iter().filter(|row| row[0] > 0);
    let oldest = suspecting.min_by_key(|row| row[0])?;
    let numbered = rows.iter().enumerate();
    let ranks = numbered.filter(|(_, row)| row[0] == oldest[0] && row[4] != 0);
    Some(Incident {
        step: oldest[0] as u64,
        samples: oldest[1] as u64..oldest[2] as u64,
        grad_norm: f64::from_bits(oldest[3] as u64),
        ranks: ranks.map(|(rank, _)| rank).collect(),
    })
}

/// A float32 scalar on the device: 1 if `norm` is not finite, else 0. The host does not read it.
pub(crate) fn found_inf(norm: &Tensor) -> Result<Tensor> {
    // The difference is 0 for a finite number and NaN for any other.
    let is_bad = tch::no_grad(|| norm.f_sub(norm)?.f_ne(0.0)?.f_to_kind(Kind::Float))?;
    Ok(is_bad)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_flag_is_set_for_what_is_not_finite() {
        for (norm, expected) in [
            (0.0, 0.0),
            (1e30, 0.0),
            (f32::MAX, 0.0),
            (f32::INFINITY, 1.0),
            (f32::NAN, 1.0),
        ] {
            let flag = found_inf(&Tensor::from(norm)).unwrap();
            assert_eq!(f64::try_from(&flag).unwrap(), expected, "{norm}");
        }
    }

    #[test]
    fn ranks_agree_on_the_oldest_step() {
        let nan = f64::NAN.to_bits() as i64;
        let rows = [
            [0; ROW],
            [7, 56, 64, nan, 1],
            [8, 64, 72, nan, 1],
            [7, 56, 64, nan, 0],
        ];
        let incident = first_incident(&rows).unwrap();
        assert_eq!((incident.step, incident.samples), (7, 56..64));
        assert_eq!(incident.ranks, [1]);
        assert!(incident.grad_norm.is_nan());
        assert_eq!(first_incident(&rows[..1]), None);
    }

    #[test]
    fn skipped_samples_are_left_out() {
        let state = GuardState {
            num_incidents: 2,
            skipped_samples: vec![16..24, 8..16],
        };
        for (position, next) in [(0, 0), (8, 24), (12, 24), (16, 24), (24, 24)] {
            assert_eq!(state.next_sample(position), next);
        }
    }
}

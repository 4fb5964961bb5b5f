//! What a job does about a step whose values cannot be used.

use std::fmt;
use std::ops::Range;

use trainyard_config::{GuardPolicy, ValueGuardSection};

use crate::rerun::Verdict;
use crate::{Drift, Incident};

/// Why the values of a step cannot be used.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Cause {
    /// The loss or the gradient norm is not finite; with `value_guard.rerun`, also why.
    NotFinite(Incident, Option<Verdict>),
    /// The loss is far above those before.
    Spike {
        step: u64,
        samples: Range<u64>,
        loss: f64,
        /// The robust z-score of the loss.
        score: f64,
    },
    /// Replicas are not equal.
    Drift { step: u64, drift: Drift },
}

impl Cause {
    /// The positions of the step's samples in the stream of samples.
    pub(crate) fn samples(&self) -> Range<u64> {
        match self {
            Cause::NotFinite(incident, _) => incident.samples.clone(),
            Cause::Spike { samples, .. } => samples.clone(),
            Cause::Drift { .. } => 0..0,
        }
    }

    /// What a user can do if the job ends.
    pub(crate) fn advice(&self) -> &'static str {
        match self {
            Cause::NotFinite(_, Some(Verdict::Transient | Verdict::Persistent { .. })) => {
                "Memory or a device has corrupted values: test the node of these ranks, then start the job again; to go \
                 on after such steps, set value_guard.policy to \"skip\" or \"rollback\""
            }
            Cause::NotFinite(..) | Cause::Spike { .. } => {
                "Look at these samples and at the learning rate; to go on without such steps, set value_guard.policy \
                 to \"skip\" or \"rollback\""
            }
            Cause::Drift { .. } => {
                "Memory, a device or the network has corrupted values: test the node of these ranks, then start the \
                 job again, it resumes from its newest checkpoint; value_guard.policy = \"rollback\" does that by itself"
            }
        }
    }

    /// Whether the step has changed parameters.
    pub(crate) fn has_updated(&self) -> bool {
        match self {
            Cause::NotFinite(incident, _) => incident.grad_norm.is_finite(),
            Cause::Spike { .. } | Cause::Drift { .. } => true,
        }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Cause::NotFinite(incident, verdict) => {
                let Incident {
                    step,
                    samples,
                    grad_norm,
                    ranks,
                } = incident;
                write!(f, "step {step}: ")?;
                match &ranks[..] {
                    [] => write!(f, "the gradient is not finite (norm {grad_norm})")?,
                    [rank] => write!(f, "the loss of rank {rank} is not finite")?,
                    ranks => {
                        let ranks: Vec<String> = ranks.iter().map(usize::to_string).collect();
                        write!(f, "the losses of ranks {} are not finite", ranks.join(", "))?;
                    }
                }
                write!(f, ", samples {} to {}", samples.start, last(samples))?;
                match verdict {
                    Some(verdict) => write!(f, "; {verdict}"),
                    None => Ok(()),
                }
            }
            Cause::Spike {
                step,
                samples,
                loss,
                score,
            } => write!(
                f,
                "step {step}: the loss {loss:.5} is a spike, {score:.1} deviations above the median, samples {} to {}",
                samples.start,
                last(samples)
            ),
            Cause::Drift { step, drift } => {
                let ranks: Vec<String> = drift.ranks.iter().map(usize::to_string).collect();
                let ranks = ranks.join(", ");
                write!(f, "step {step}: replicas differ on rank {ranks}")?;
                match &drift.tensors[..] {
                    [] => Ok(()),
                    [tensor] => write!(f, " in {tensor}"),
                    [tensor, others @ ..] => write!(f, " in {tensor} and {} more", others.len()),
                }
            }
        }
    }
}

fn last(samples: &Range<u64>) -> u64 {
    samples.end.saturating_sub(1)
}

/// What the job does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// It ends.
    Stop,
    /// It goes on.
    Continue,
    /// It goes back to the newest checkpoint.
    Rollback,
}

/// What to do about incident number `num_incidents`, counted from 1. Replicas that differ cannot be skipped.
pub(crate) fn decide(section: &ValueGuardSection, cause: &Cause, num_incidents: u64) -> Action {
    match section.policy {
        _ if num_incidents > section.max_incidents => Action::Stop,
        GuardPolicy::Stop => Action::Stop,
        GuardPolicy::Skip if matches!(cause, Cause::Drift { .. }) => Action::Stop,
        GuardPolicy::Skip => Action::Continue,
        GuardPolicy::Rollback => Action::Rollback,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn not_finite(ranks: &[usize]) -> Cause {
        let incident = Incident {
            step: 7,
            samples: 48..56,
            grad_norm: f64::NAN,
            ranks: ranks.to_vec(),
        };
        Cause::NotFinite(incident, None)
    }

    fn drift() -> Cause {
        Cause::Drift {
            step: 7,
            drift: Drift {
                ranks: vec![2],
                tensors: vec!["a".into(), "b".into(), "c".into()],
            },
        }
    }

    #[test]
    fn the_budget_ends_every_policy() {
        for (policy, within, after_drift) in [
            (GuardPolicy::Stop, Action::Stop, Action::Stop),
            (GuardPolicy::Skip, Action::Continue, Action::Stop),
            (GuardPolicy::Rollback, Action::Rollback, Action::Rollback),
        ] {
            let section = ValueGuardSection {
                policy,
                max_incidents: 2,
                ..ValueGuardSection::default()
            };
            assert_eq!(decide(&section, &not_finite(&[]), 1), within);
            assert_eq!(decide(&section, &not_finite(&[]), 2), within);
            assert_eq!(decide(&section, &not_finite(&[]), 3), Action::Stop);
            assert_eq!(decide(&section, &drift(), 1), after_drift);
        }
    }

    #[test]
    fn the_message_names_step_samples_and_ranks() {
        assert_eq!(
            not_finite(&[1, 3]).to_string(),
            "step 7: the losses of ranks 1, 3 are not finite, samples 48 to 55"
        );
        assert_eq!(
            not_finite(&[]).to_string(),
            "step 7: the gradient is not finite (norm NaN), samples 48 to 55"
        );
        assert_eq!(
            drift().to_string(),
            "step 7: replicas differ on rank 2 in a and 2 more"
        );
    }
}

//! Which checkpoint a job resumes from: the one in storage or the one in the memory of its peers.

use std::fmt;

/// Where a checkpoint is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// The checkpoint directory of the job.
    Storage,
    /// The memory of the replica servers.
    Memory,
}

/// The checkpoint to resume from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResumePoint {
    /// Where the checkpoint is.
    pub tier: Tier,
    /// The step after which it was saved.
    pub step: u64,
    /// The newest step of the other tier.
    pub other_step: Option<u64>,
}

/// Selects the newest checkpoint; of two at the same step the one in memory, because reading it needs no storage.
pub fn select_resume_point(storage: Option<u64>, memory: Option<u64>) -> Option<ResumePoint> {
    let point = |tier, step, other_step| ResumePoint {
        tier,
        step,
        other_step,
    };
    match (storage, memory) {
        (Some(stored), Some(step)) if step < stored => {
            Some(point(Tier::Storage, stored, Some(step)))
        }
        (stored, Some(step)) => Some(point(Tier::Memory, step, stored)),
        (Some(step), None) => Some(point(Tier::Storage, step, None)),
        (None, None) => None,
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Tier::Storage => "storage",
            Tier::Memory => "peer memory",
        })
    }
}

impl fmt::Display for ResumePoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let other = match self.tier {
            Tier::Storage => Tier::Memory,
            Tier::Memory => Tier::Storage,
        };
        write!(f, "resuming from step {} in {}; ", self.step, self.tier)?;
        match self.other_step {
            Some(step) => write!(f, "{other} has step {step}"),
            None => write!(f, "{other} has none"),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_resume_point_explains_the_choice() {
        let text =
            |storage, memory| select_resume_point(storage, memory).map(|point| point.to_string());
        assert_eq!(
            text(Some(30), Some(40)).unwrap(),
            "resuming from step 40 in peer memory; storage has step 30"
        );
        assert_eq!(
            text(Some(30), Some(20)).unwrap(),
            "resuming from step 30 in storage; peer memory has step 20"
        );
        assert_eq!(
            text(None, Some(20)).unwrap(),
            "resuming from step 20 in peer memory; storage has none"
        );
        assert_eq!(text(None, None), None);
    }

    proptest! {
        #[test]
        fn the_newest_checkpoint_is_selected(storage: Option<u64>, memory: Option<u64>) {
            let point = select_resume_point(storage, memory);
            prop_assert_eq!(point.map(|point| point.step), storage.max(memory));
            let is_memory = point.map(|point| point.tier) == Some(Tier::Memory);
            prop_assert_eq!(is_memory, memory.is_some() && memory >= storage);
        }
    }
}

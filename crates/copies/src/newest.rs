//! From where to go on: storage, or peers' memory.

use std::fmt;

/// Where a checkpoint lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The job's folder.
    Storage,
    /// The memory of holders.
    Memory,
}

/// From where to go on, and what else there was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Where it lies.
    pub place: Place,
    /// After which step it was taken.
    pub step: u64,
    /// The newest step in the other place.
    pub other: Option<u64>,
}

/// The newest of what storage and memory have; of the same step the one that no storage is read for.
pub fn newest(storage: Option<u64>, memory: Option<u64>) -> Option<Choice> {
    let choice = |place, step, other| Choice { place, step, other };
    match (storage, memory) {
        (Some(stored), Some(step)) if step < stored => {
            Some(choice(Place::Storage, stored, Some(step)))
        }
        (stored, Some(step)) => Some(choice(Place::Memory, step, stored)),
        (Some(step), None) => Some(choice(Place::Storage, step, None)),
        (None, None) => None,
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Place::Storage => "storage",
            Place::Memory => "peers' memory",
        })
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let other = match self.place {
            Place::Storage => Place::Memory,
            Place::Memory => Place::Storage,
        };
        write!(f, "resuming from step {} in {}; ", self.step, self.place)?;
        match self.other {
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
    fn a_choice_says_why() {
        let say = |storage, memory| newest(storage, memory).map(|choice| choice.to_string());
        assert_eq!(
            say(Some(30), Some(40)).unwrap(),
            "resuming from step 40 in peers' memory; storage has step 30"
        );
        assert_eq!(
            say(Some(30), Some(20)).unwrap(),
            "resuming from step 30 in storage; peers' memory has step 20"
        );
        assert_eq!(
            say(None, Some(20)).unwrap(),
            "resuming from step 20 in peers' memory; storage has none"
        );
        assert_eq!(say(None, None), None);
    }

    proptest! {
        #[test]
        fn nothing_newer_is_left_behind(storage: Option<u64>, memory: Option<u64>) {
            let step = newest(storage, memory).map(|choice| choice.step);
            prop_assert_eq!(step, storage.max(memory));
            let place = newest(storage, memory).map(|choice| choice.place);
            prop_assert_eq!(place == Some(Place::Memory), memory.is_some() && memory >= storage);
        }
    }
}

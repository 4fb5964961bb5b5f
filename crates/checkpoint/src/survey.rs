//! The condition of every checkpoint in a folder.

use std::sync::Arc;

use crate::step_dir::{step_dir, steps_below};
use crate::{Checkpoint, Result, Store};

/// The condition of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Condition {
    /// All files are there, and every digest matches.
    Whole,
    /// The remainder of an interrupted save or deletion.
    Partial,
    /// It cannot be used, for this reason.
    Damaged(String),
}

/// Reads all checkpoints of a folder and checks every digest: their steps and conditions, oldest first. Calls
/// `progress` with each step before it is read.
pub fn survey(
    store: &Arc<dyn Store>,
    mut progress: impl FnMut(u64),
) -> Result<Vec<(u64, Condition)>> {
    let (complete, partial) = steps_below(&**store, u64::MAX)?;
    let mut found: Vec<_> = partial
        .into_iter()
        .map(|step| (step, Condition::Partial))
        .collect();
    for step in complete {
        progress(step);
        let opened = Checkpoint::open(Arc::clone(store), &step_dir(step));
        let condition = match opened.and_then(|checkpoint| checkpoint.verify(|_| ())) {
            Ok(()) => Condition::Whole,
            Err(error) if error.is_damage() => Condition::Damaged(error.to_string()),
            Err(error) => return Err(error),
        };
        found.push((step, condition));
    }
    found.sort_by_key(|(step, _)| *step);
    Ok(found)
}

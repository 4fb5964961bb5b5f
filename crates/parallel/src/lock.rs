//! Locking of state that hooks share with the training loop.

use std::sync::{Mutex, MutexGuard};

/// Poisoning is ignored: a panic inside a hook is reported as the error of that hook, and the next pass resets the
/// state.
pub(crate) fn lock<T>(state: &Mutex<T>) -> MutexGuard<'_, T> {
    state
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

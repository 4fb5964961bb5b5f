//! Runs two passes on two threads that take turns: while one waits for a collective, the other computes.
//!
//! The threads switch at every wait, even at one that would return at once. Switches then depend on the program and
//! not on timing, so all ranks start their collectives in the same order. The passes never compute at the same time
//! and need no more cores than one pass.

use std::cell::RefCell;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use crate::error::{Result, TorchError};

thread_local! {
    static PARTY: RefCell<Option<Party>> = const { RefCell::new(None) };
}

/// One of the two passes, as its thread sees it.
#[derive(Clone)]
struct Party {
    handoff: Arc<Handoff>,
    number: usize,
}

/// Passes the right to run from one thread to the other.
#[derive(Default)]
struct Handoff {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// The index of the pass that may run.
    turn: usize,
    finished: [bool; 2],
}

/// Runs `here` on this thread, which starts, and `there` on another; they switch whenever one waits for a collective.
pub fn interleave<A, B: Send>(
    here: impl FnOnce() -> A,
    there: impl FnOnce() -> B + Send,
) -> Result<(A, B)> {
    let handoff = Arc::new(Handoff::default());
    let parties = [0, 1].map(|number| Party {
        handoff: Arc::clone(&handoff),
        number,
    });
    let [first, second] = parties;
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("interleave".to_owned());
        let other = thread
            .spawn_scoped(scope, move || second.run(there))
            .map_err(|error| TorchError::Other(format!("cannot start a thread: {error}")))?;
        let here = first.run(here);
        let there = other.join();
        let there =
            there.map_err(|_| TorchError::Other("an interleaved pass panicked".to_owned()))?;
        Ok((here, there))
    })
}

/// Whether this thread is one of two that take turns.
pub(crate) fn is_active() -> bool {
    PARTY.with_borrow(Option::is_some)
}

/// Lets the other pass run, if there is one, and returns when this pass may run again.
pub(crate) fn yield_turn() {
    if let Some(party) = PARTY.with_borrow(Clone::clone) {
        party.yield_turn();
    }
}

impl Party {
    fn run<T>(self, pass: impl FnOnce() -> T) -> T {
        // Dropped on return and on panic, so that the other pass never waits forever.
        let _finish = FinishGuard(self.clone());
        self.await_turn(self.handoff.lock());
        PARTY.set(Some(self));
        pass()
    }

    fn yield_turn(&self) {
        let mut state = self.handoff.lock();
        if !state.finished[1 - self.number] {
            state.turn = 1 - self.number;
            self.handoff.changed.notify_all();
            self.await_turn(state);
        }
    }

    fn await_turn(&self, state: MutexGuard<'_, State>) {
        let is_others =
            |state: &mut State| state.turn != self.number && !state.finished[1 - self.number];
        let waited = self.handoff.changed.wait_while(state, is_others);
        drop(waited.unwrap_or_else(|poisoned| poisoned.into_inner()));
    }
}

impl Handoff {
    fn lock(&self) -> MutexGuard<'_, State> {
        let locked = self.state.lock();
        locked.unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// Marks a pass as finished when dropped.
struct FinishGuard(Party);

impl Drop for FinishGuard {
    fn drop(&mut self) {
        PARTY.set(None);
        let mut state = self.0.handoff.lock();
        state.finished[self.0.number] = true;
        state.turn = 1 - self.0.number;
        self.0.handoff.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passes_switch_only_where_they_wait() -> Result<()> {
        let log = Mutex::new(Vec::new());
        let note = |what| log.lock().unwrap().push(what);
        let steps = |names: [&'static str; 3]| {
            for name in names {
                note(name);
                yield_turn();
            }
        };
        interleave(|| steps(["a1", "a2", "a3"]), || steps(["b1", "b2", "b3"]))?;
        assert_eq!(*log.lock().unwrap(), ["a1", "b1", "a2", "b2", "a3", "b3"]);
        Ok(())
    }

    #[test]
    fn the_longer_pass_continues_alone() -> Result<()> {
        let (a, b) = interleave(|| 1, || (0..3).map(|n| (yield_turn(), n).1).sum::<i32>())?;
        assert_eq!((a, b), (1, 3));
        yield_turn();
        Ok(())
    }

    #[test]
    fn a_panic_on_the_other_thread_is_an_error() {
        let outcome = interleave(yield_turn, || panic!("expected by the test"));
        assert!(outcome.is_err());
    }
}

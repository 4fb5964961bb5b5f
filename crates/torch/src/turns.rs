//! Two passes beside each other, on two threads that take turns.
//!
//! While one waits for a collective, the other computes. They change at every wait, even at one that
//! would have returned at once: when changes follow from the program and not from the clock, all
//! ranks start their collectives in the same order. Both never compute at once, so they need no more
//! cores than one.

use std::cell::RefCell;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use crate::error::{Result, TorchError};

thread_local! {
    static SIDE: RefCell<Option<Side>> = const { RefCell::new(None) };
}

/// One of the two, as its thread knows it.
#[derive(Clone)]
struct Side {
    turns: Arc<Turns>,
    number: usize,
}

#[derive(Default)]
struct Turns {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Whose turn it is.
    turn: usize,
    over: [bool; 2],
}

/// Runs `here` on this thread, which begins, and `there` on another.
pub fn beside<A, B: Send>(
    here: impl FnOnce() -> A,
    there: impl FnOnce() -> B + Send,
) -> Result<(A, B)> {
    let turns = Arc::new(Turns::default());
    let sides = [0, 1].map(|number| Side {
        turns: Arc::clone(&turns),
        number,
    });
    let [first, second] = sides;
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("beside".to_owned());
        let other = thread
            .spawn_scoped(scope, move || second.run(there))
            .map_err(|error| TorchError::Other(format!("cannot start a thread: {error}")))?;
        let here = first.run(here);
        let there = other.join();
        let there = there.map_err(|_| TorchError::Other("a pass panicked".to_owned()))?;
        Ok((here, there))
    })
}

/// Lets the other pass go on, if there is one, until it is this one's turn again.
pub(crate) fn pass() {
    if let Some(side) = SIDE.with_borrow(Clone::clone) {
        side.pass();
    }
}

impl Side {
    fn run<T>(self, pass: impl FnOnce() -> T) -> T {
        // Dropped at the end, however it comes, so that the other never waits for ever.
        let _ending = Ending(self.clone());
        self.await_turn(self.turns.lock());
        SIDE.set(Some(self));
        pass()
    }

    fn pass(&self) {
        let mut state = self.turns.lock();
        if !state.over[1 - self.number] {
            state.turn = 1 - self.number;
            self.turns.changed.notify_all();
            self.await_turn(state);
        }
    }

    fn await_turn(&self, state: MutexGuard<'_, State>) {
        let is_others =
            |state: &mut State| state.turn != self.number && !state.over[1 - self.number];
        let waited = self.turns.changed.wait_while(state, is_others);
        drop(waited.unwrap_or_else(|poisoned| poisoned.into_inner()));
    }
}

impl Turns {
    fn lock(&self) -> MutexGuard<'_, State> {
        let locked = self.state.lock();
        locked.unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

struct Ending(Side);

impl Drop for Ending {
    fn drop(&mut self) {
        SIDE.set(None);
        let mut state = self.0.turns.lock();
        state.over[self.0.number] = true;
        state.turn = 1 - self.0.number;
        self.0.turns.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passes_change_where_they_wait_and_nowhere_else() -> Result<()> {
        let log = Mutex::new(Vec::new());
        let note = |what| log.lock().unwrap().push(what);
        let steps = |names: [&'static str; 3]| {
            for name in names {
                note(name);
                pass();
            }
        };
        beside(|| steps(["a1", "a2", "a3"]), || steps(["b1", "b2", "b3"]))?;
        assert_eq!(*log.lock().unwrap(), ["a1", "b1", "a2", "b2", "a3", "b3"]);
        Ok(())
    }

    #[test]
    fn the_longer_pass_goes_on_alone() -> Result<()> {
        let (a, b) = beside(|| 1, || (0..3).map(|n| (pass(), n).1).sum::<i32>())?;
        assert_eq!((a, b), (1, 3));
        pass();
        Ok(())
    }

    #[test]
    fn a_panic_on_the_other_thread_is_an_error() {
        let outcome = beside(pass, || panic!("as the test wants it"));
        assert!(outcome.is_err());
    }
}

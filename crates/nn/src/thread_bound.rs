//! A value that stays on its thread, behind a handle that can be sent to other threads.
//!
//! libtorch requires hooks that could run on any thread, while models and strategies use `Rc`. A thread that has such a
//! value runs its backward itself, also that of a GPU, for which libtorch would use a thread of its own; so a hook
//! finds its value. A backward that another thread starts gets an error.

use std::{
    any::Any,
    cell::{Cell, RefCell},
    collections::HashMap,
    marker::PhantomData,
    rc::Rc,
    thread::{self, ThreadId},
};

use trainyard_torch::autograd;

use crate::{NnError, Result};

thread_local! {
    static VALUES: RefCell<HashMap<u64, Rc<dyn Any>>> = RefCell::default();
    static NEXT: Cell<u64> = const { Cell::new(0) };
}

/// A `Send` handle to a value that only its own thread can access.
///
/// The value is dropped with the handle, or at the end of its thread if the handle is dropped elsewhere.
pub struct ThreadBound<T: 'static> {
    thread: ThreadId,
    key: u64,
    value: PhantomData<fn() -> T>,
}

impl<T: 'static> ThreadBound<T> {
    /// Stores `value` on this thread.
    pub fn new(value: T) -> ThreadBound<T> {
        autograd::run_backward_on_calling_thread();
        let key = NEXT.replace(NEXT.get() + 1);
        VALUES.with_borrow_mut(|values| values.insert(key, Rc::new(value)));
        ThreadBound {
            thread: thread::current().id(),
            key,
            value: PhantomData,
        }
    }

    /// The value, if this is its thread.
    pub fn get(&self) -> Result<Rc<T>> {
        if self.thread != thread::current().id() {
            return Err(NnError::OtherThread);
        }
        VALUES
            .with_borrow(|values| values.get(&self.key).cloned())
            .and_then(|value| value.downcast().ok())
            .ok_or(NnError::OtherThread)
    }
}

impl<T: 'static> Drop for ThreadBound<T> {
    fn drop(&mut self) {
        if self.thread == thread::current().id() {
            // Remove the value first and drop it afterwards, because its own drop may come back here. The table may
            // be gone if the thread is ending.
            let value = VALUES.try_with(|values| values.try_borrow_mut().ok()?.remove(&self.key));
            drop(value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_value_is_accessible_on_its_own_thread_only() {
        let bound = ThreadBound::new(Rc::new(5));
        assert_eq!(**bound.get().unwrap(), 5);
        let bound = thread::spawn(move || {
            assert!(matches!(bound.get(), Err(NnError::OtherThread)));
            bound
        })
        .join()
        .unwrap();
        assert_eq!(**bound.get().unwrap(), 5);
    }

    #[test]
    fn is_dropped_with_its_handle() {
        let value = Rc::new(());
        let outer = ThreadBound::new(ThreadBound::new(value.clone()));
        assert_eq!(Rc::strong_count(&value), 2);
        drop(outer);
        assert_eq!(Rc::strong_count(&value), 1);
    }
}

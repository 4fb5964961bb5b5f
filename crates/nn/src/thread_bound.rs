//! A value that stays on its thread, behind a handle that may travel.
//!
//! libtorch wants hooks that could run on any thread, while models and strategies are shared within
//! one (`Rc`). On the thread that ran forward, backward runs too, and there a hook finds its value;
//! elsewhere it is told so instead of being given it.

use std::{
    any::Any,
    cell::{Cell, RefCell},
    collections::HashMap,
    marker::PhantomData,
    rc::Rc,
    thread::{self, ThreadId},
};

use crate::{NnError, Result};

thread_local! {
    static VALUES: RefCell<HashMap<u64, Rc<dyn Any>>> = RefCell::default();
    static NEXT: Cell<u64> = const { Cell::new(0) };
}

/// A handle that can be sent anywhere, to a value that can be reached on its own thread only.
///
/// The value is dropped with the handle, or at the end of its thread if the handle ends elsewhere.
pub struct ThreadBound<T: 'static> {
    thread: ThreadId,
    key: u64,
    value: PhantomData<fn() -> T>,
}

impl<T: 'static> ThreadBound<T> {
    /// Leaves `value` on this thread.
    pub fn new(value: T) -> ThreadBound<T> {
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
            // Taken out first and dropped after, since the value's own drop may come back here; the
            // table is gone already when the thread is ending.
            let value = VALUES.try_with(|values| values.try_borrow_mut().ok()?.remove(&self.key));
            drop(value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_reached_on_its_own_thread_only() {
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

//! The queue of a group, whose collectives run in the order in which they were issued.
//!
//! A collective that consists of several sends and receives needs a thread that makes progress while the caller
//! computes: the group's communication thread. With one queue per group, all ranks run the group's collectives in the
//! same order. A caller that waits at once runs its collective itself, which saves two switches between threads.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;

use trainyard_trace::{Ledger, MemoryKind};

use crate::memory;

/// A queued collective; an error is the backend's message.
pub(crate) type Task = Box<dyn FnOnce() -> Result<(), String> + Send>;

/// A thread and its queue of collectives.
pub(crate) struct CommThread {
    queue: Arc<Queue>,
    thread: Option<JoinHandle<()>>,
}

/// The collectives of a group that have not run.
struct Queue {
    state: Mutex<QueueState>,
    changed: Condvar,
    ledger: Ledger,
}

#[derive(Default)]
struct QueueState {
    entries: VecDeque<Entry>,
    /// Whether a collective is running.
    is_running: bool,
    /// Whether no more collectives will come.
    is_closed: bool,
}

struct Entry {
    task: Task,
    completion: Arc<Completion>,
    /// Whether the caller runs it when it waits.
    is_callers: bool,
}

/// The completion of one task, which other threads can wait for.
#[derive(Default)]
pub(crate) struct Completion {
    state: Mutex<Progress>,
    changed: Condvar,
    /// If the caller runs the task: where it is queued.
    queue: Option<Arc<Queue>>,
}

/// When a task ran, and its result once it has ended.
#[derive(Default, Clone)]
pub(crate) struct Progress {
    pub started_ns: u64,
    pub ended_ns: u64,
    pub result: Option<Result<(), String>>,
}

impl CommThread {
    pub(crate) fn new(name: &str, ledger: Ledger) -> std::io::Result<CommThread> {
        let queue = Arc::new(Queue {
            state: Mutex::default(),
            changed: Condvar::new(),
            ledger,
        });
        let own = Arc::clone(&queue);
        let thread = std::thread::Builder::new()
            .name(format!("comm {name}"))
            .spawn(move || while own.run_next(|entry| !entry.is_callers) {})?;
        Ok(CommThread {
            queue,
            thread: Some(thread),
        })
    }

    /// Queues a task, which runs as soon as those before it have.
    pub(crate) fn run(&self, task: Task) -> Arc<Completion> {
        self.queue.push(task, false)
    }

    /// Queues a task, which runs when the caller waits for it. Later tasks run after it.
    pub(crate) fn run_when_waited_for(&self, task: Task) -> Arc<Completion> {
        self.queue.push(task, true)
    }
}

impl Queue {
    fn push(self: &Arc<Queue>, task: Task, is_callers: bool) -> Arc<Completion> {
        let completion = Arc::new(Completion {
            queue: is_callers.then(|| Arc::clone(self)),
            ..Completion::default()
        });
        self.lock().entries.push_back(Entry {
            task,
            completion: Arc::clone(&completion),
            is_callers,
        });
        if !is_callers {
            self.changed.notify_all();
        }
        completion
    }

    /// Waits until the first task is one that `is_own` and no other runs, and runs it; returns whether there was one before
    /// the queue was closed.
    fn run_next(&self, is_own: impl Fn(&Entry) -> bool) -> bool {
        let mut state = self.lock();
        let entry = loop {
            let is_next = !state.is_running && state.entries.front().is_some_and(&is_own);
            if is_next && let Some(entry) = state.entries.pop_front() {
                break entry;
            }
            if state.is_closed && state.entries.is_empty() {
                return false;
            }
            state = self
                .changed
                .wait(state)
                .unwrap_or_else(|poisoned| poisoned.into_inner());
        };
        state.is_running = true;
        drop(state);
        entry.run(&self.ledger);
        let mut state = self.lock();
        state.is_running = false;
        let is_awaited = !state.entries.is_empty() || state.is_closed;
        drop(state);
        if is_awaited {
            self.changed.notify_all();
        }
        true
    }

    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(|p| p.into_inner())
    }
}

impl Entry {
    /// Counts allocations of collectives as communication, and keeps them out of autograd.
    fn run(self, ledger: &Ledger) {
        let _no_grad = tch::no_grad_guard();
        memory::scope(MemoryKind::Communication, || {
            self.completion.lock().started_ns = ledger.now_ns();
            // A thread may wait for the completion, so a panic must complete it too.
            let result = catch_unwind(AssertUnwindSafe(self.task))
                .unwrap_or_else(|panic| Err(panic_message(&*panic)));
            self.completion.finish(ledger.now_ns(), result);
        });
    }
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let message = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!(
        "the communication thread panicked: {}",
        message.unwrap_or("no message")
    )
}

impl Drop for CommThread {
    fn drop(&mut self) {
        self.queue.lock().is_closed = true;
        self.queue.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has nothing left to finish.
            let _ = thread.join();
        }
    }
}

impl Completion {
    /// Waits until the task has ended.
    pub(crate) fn wait(&self) -> Progress {
        if let Some(queue) = &self.queue {
            queue.run_next(|entry| std::ptr::eq(&*entry.completion, self));
        }
        let mut state = self.lock();
        while state.result.is_none() {
            state = self
                .changed
                .wait(state)
                .unwrap_or_else(|poisoned| poisoned.into_inner());
        }
        state.clone()
    }

    /// Whether the task has ended.
    pub(crate) fn is_done(&self) -> bool {
        self.lock().result.is_some()
    }

    fn finish(&self, ended_ns: u64, result: Result<(), String>) {
        let mut state = self.lock();
        state.ended_ns = ended_ns;
        state.result = Some(result);
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Progress> {
        self.state.lock().unwrap_or_else(|p| p.into_inner())
    }
}

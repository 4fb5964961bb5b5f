//! The communication thread of a group, which runs the group's collectives in the order in which they were issued.
//!
//! A collective that consists of several sends and receives needs a thread that makes progress while the caller
//! computes. With one thread per group, all ranks run the group's collectives in the same order.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;

use trainyard_trace::{Ledger, MemoryKind};

use crate::memory;

/// A queued collective; an error is the backend's message.
pub(crate) type Task = Box<dyn FnOnce() -> Result<(), String> + Send>;

/// A thread and its queue of collectives.
pub(crate) struct CommThread {
    queue: Option<Sender<(Task, Arc<Completion>)>>,
    thread: Option<JoinHandle<()>>,
}

/// The completion of one task, which other threads can wait for.
#[derive(Default)]
pub(crate) struct Completion {
    state: Mutex<Progress>,
    changed: Condvar,
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
        let (queue, tasks) = channel::<(Task, Arc<Completion>)>();
        let thread = std::thread::Builder::new()
            .name(format!("comm {name}"))
            .spawn(move || {
                // Count allocations of collectives as communication, and keep them out of autograd.
                let _no_grad = tch::no_grad_guard();
                memory::scope(MemoryKind::Communication, || {
                    for (task, completion) in tasks {
                        completion.lock().started_ns = ledger.now_ns();
                        // A thread may wait for the completion, so a panic must complete it too.
                        let result = catch_unwind(AssertUnwindSafe(task))
                            .unwrap_or_else(|panic| Err(panic_message(&*panic)));
                        completion.finish(ledger.now_ns(), result);
                    }
                });
            })?;
        Ok(CommThread {
            queue: Some(queue),
            thread: Some(thread),
        })
    }

    /// Queues a task.
    pub(crate) fn run(&self, task: Task) -> Arc<Completion> {
        let completion = Arc::new(Completion::default());
        let sent = self
            .queue
            .as_ref()
            .map(|queue| queue.send((task, Arc::clone(&completion))).is_ok());
        if sent != Some(true) {
            completion.finish(
                0,
                Err("the group's communication thread has ended".to_owned()),
            );
        }
        completion
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
        drop(self.queue.take());
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has nothing left to finish.
            let _ = thread.join();
        }
    }
}

impl Completion {
    /// Waits until the task has ended.
    pub(crate) fn wait(&self) -> Progress {
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

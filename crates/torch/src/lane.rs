//! A group's lane: one thread that carries out its collectives in the order they were asked for.
//!
//! Collectives composed of several messages need somebody to go on with them while the caller
//! computes. A lane is that somebody, and since there is one per group, all ranks see the group's
//! collectives in one order.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;

use trainyard_trace::{Ledger, MemoryKind};

use crate::memory;

/// What the lane runs: an error is the backend's message.
pub(crate) type Task = Box<dyn FnOnce() -> Result<(), String> + Send>;

/// The thread and the queue in front of it.
pub(crate) struct Lane {
    queue: Option<Sender<(Task, Arc<Ticket>)>>,
    thread: Option<JoinHandle<()>>,
}

/// The state of one task.
#[derive(Default)]
pub(crate) struct Ticket {
    state: Mutex<Progress>,
    changed: Condvar,
}

/// When a task ran, and how it ended.
#[derive(Default, Clone)]
pub(crate) struct Progress {
    pub started_ns: u64,
    pub ended_ns: u64,
    pub result: Option<Result<(), String>>,
}

impl Lane {
    pub(crate) fn new(name: &str, ledger: Ledger) -> std::io::Result<Lane> {
        let (queue, tasks) = channel::<(Task, Arc<Ticket>)>();
        let thread = std::thread::Builder::new()
            .name(format!("lane {name}"))
            .spawn(move || {
                // What collectives allocate is theirs, and none of it is for autograd.
                let _no_grad = tch::no_grad_guard();
                memory::scope(MemoryKind::Communication, || {
                    for (task, ticket) in tasks {
                        ticket.lock().started_ns = ledger.now_ns();
                        // Somebody waits for the ticket: a panic must not leave it open.
                        let result = catch_unwind(AssertUnwindSafe(task))
                            .unwrap_or_else(|panic| Err(panic_message(&*panic)));
                        ticket.finish(ledger.now_ns(), result);
                    }
                });
            })?;
        Ok(Lane {
            queue: Some(queue),
            thread: Some(thread),
        })
    }

    /// Queues a task.
    pub(crate) fn run(&self, task: Task) -> Arc<Ticket> {
        let ticket = Arc::new(Ticket::default());
        let sent = self
            .queue
            .as_ref()
            .map(|queue| queue.send((task, Arc::clone(&ticket))).is_ok());
        if sent != Some(true) {
            ticket.finish(0, Err("the group's thread has ended".to_owned()));
        }
        ticket
    }
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let words = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("it panicked: {}", words.unwrap_or("no message"))
}

impl Drop for Lane {
    fn drop(&mut self) {
        drop(self.queue.take());
        if let Some(thread) = self.thread.take() {
            // A lane that panicked has nothing left to finish.
            let _ = thread.join();
        }
    }
}

impl Ticket {
    /// Waits for the end of the task.
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

//! The record that a rank keeps of itself.
//!
//! A ledger always counts, because counting costs next to nothing, and always remembers the last
//! events of each kind, because a hang is explained by what came just before it. It keeps every
//! event only when asked to.

use std::{
    collections::{BTreeMap, VecDeque},
    path::Path,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use crate::{
    Allocation, Collective, CollectiveKind, Events, MemoryKind, MemoryTotal, Operator,
    OperatorTotal, Purpose, Span, SpanGuard, SpanKind, SpanTotal, Total, Totals, TraceError, Which,
    clock, write_chrome,
};

/// How many events of each kind a ledger remembers when it does not record.
const REMEMBERED: usize = 1024;

/// A rank's ledger: a handle that is cheap to clone and to share between threads.
#[derive(Clone, Debug)]
pub struct Ledger(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    rank: usize,
    capacity: usize,
    next_ticket: AtomicU64,
    book: Mutex<Book>,
}

/// A collective that has begun and not finished.
#[must_use = "a collective that is never finished reads as hanging"]
#[derive(Debug, Eq, PartialEq)]
pub struct Ticket(u64);

impl Ledger {
    /// A ledger that counts everything and remembers the last events.
    pub fn new(rank: usize) -> Ledger {
        Ledger::keeping(rank, REMEMBERED)
    }

    /// A ledger that keeps every event as well.
    pub fn recording(rank: usize) -> Ledger {
        Ledger::keeping(rank, usize::MAX)
    }

    fn keeping(rank: usize, capacity: usize) -> Ledger {
        let (next_ticket, book) = (AtomicU64::new(0), Mutex::default());
        Ledger(Arc::new(Shared {
            rank,
            capacity,
            next_ticket,
            book,
        }))
    }

    /// The rank whose ledger this is.
    pub fn rank(&self) -> usize {
        self.0.rank
    }

    /// Whether every event is kept.
    pub fn is_recording(&self) -> bool {
        self.0.capacity == usize::MAX
    }

    /// Nanoseconds since 1970: aligned between ranks of a machine, never backwards within one.
    pub fn now_ns(&self) -> u64 {
        clock::now_ns()
    }

    /// Writes a finished collective.
    pub fn collective(&self, collective: Collective) {
        self.book().collective(collective, self.0.capacity);
    }

    /// Writes a collective that has been issued; it is counted when it is [finished](Self::finish).
    pub fn begin(&self, collective: Collective) -> Ticket {
        let number = self.0.next_ticket.fetch_add(1, Ordering::Relaxed);
        self.book().pending.insert(number, collective);
        Ticket(number)
    }

    /// Writes that the caller now stands in `wait` for what [`begin`](Self::begin) wrote.
    pub fn wait(&self, ticket: &Ticket, since_ns: u64) {
        if let Some(collective) = self.book().pending.get_mut(&ticket.0) {
            collective.waited = Some((since_ns, since_ns));
        }
    }

    /// Completes what [`begin`](Self::begin) wrote: `complete` fills in what is known only now.
    pub fn finish(&self, ticket: Ticket, complete: impl FnOnce(&mut Collective)) {
        let mut book = self.book();
        if let Some(mut collective) = book.pending.remove(&ticket.0) {
            complete(&mut collective);
            book.collective(collective, self.0.capacity);
        }
    }

    /// The collectives that have begun and not finished, oldest first.
    pub fn pending(&self) -> Vec<Collective> {
        self.book().pending.values().cloned().collect()
    }

    /// Of each group, the last collective that is finished, and of all groups the last one last.
    pub fn passed(&self) -> Vec<Which> {
        self.book().passed.clone()
    }

    /// How long callers have stood in `wait` since the ledger began or was reset.
    pub fn waited_ns(&self) -> u64 {
        self.book().waited_ns
    }

    /// Writes a span.
    pub fn span(&self, span: Span) {
        self.book().span(span, self.0.capacity);
    }

    /// Opens a span that ends when the guard is dropped.
    pub fn enter(&self, kind: SpanKind, name: impl Into<String>) -> SpanGuard<'_> {
        SpanGuard::open(self, kind, name.into())
    }

    /// Writes memory taken or given back.
    pub fn allocation(&self, allocation: Allocation) {
        self.book().allocation(allocation, self.0.capacity);
    }

    /// Writes an operator.
    pub fn operator(&self, operator: Operator) {
        self.book().operator(operator, self.0.capacity);
    }

    /// What has been counted since the ledger began or was reset.
    pub fn totals(&self) -> Totals {
        self.book().totals()
    }

    /// A copy of the events that are kept.
    pub fn events(&self) -> Events {
        self.book().events(self.0.rank)
    }

    /// Forgets counts and events. What is pending stays so, for it is still happening, and so does how far
    /// each group is.
    pub fn reset(&self) {
        let mut book = self.book();
        let pending = std::mem::take(&mut book.pending);
        let passed = std::mem::take(&mut book.passed);
        *book = Book {
            pending,
            passed,
            ..Book::default()
        };
    }

    /// Writes the events as a trace that Chrome and Perfetto open.
    pub fn write_chrome(&self, path: impl AsRef<Path>) -> Result<(), TraceError> {
        write_chrome(path, &[self.events()])
    }

    /// A panic elsewhere cannot leave a book half-written in a way that matters, so it is read on.
    fn book(&self) -> MutexGuard<'_, Book> {
        self.0.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Counts by index, and the events that are kept.
#[derive(Debug, Default)]
struct Book {
    by_kind: [[Total; Purpose::COUNT]; CollectiveKind::COUNT],
    moving_ns: [u64; Purpose::COUNT],
    waited_ns: u64,
    by_span: [SpanTotal; SpanKind::COUNT],
    by_memory: [MemoryTotal; MemoryKind::COUNT],
    of_operators: OperatorTotal,
    pending: BTreeMap<u64, Collective>,
    /// One per group, the latest last.
    passed: Vec<Which>,
    collectives: VecDeque<Collective>,
    spans: VecDeque<Span>,
    operators: VecDeque<Operator>,
    allocations: VecDeque<Allocation>,
}

impl Book {
    fn collective(&mut self, collective: Collective, capacity: usize) {
        let total = &mut self.by_kind[collective.kind.index()][collective.purpose.index()];
        total.count += 1;
        total.payload_bytes += collective.payload_bytes;
        total.sent_bytes += collective.sent_bytes;
        self.moving_ns[collective.purpose.index()] += collective.duration_ns();
        self.waited_ns += collective.waited_ns();
        self.pass(&collective);
        remember(&mut self.collectives, collective, capacity);
    }

    /// Groups are few, and messages between two ranks have numbers of their own.
    fn pass(&mut self, collective: &Collective) {
        if collective.kind.is_message() {
            return;
        }
        let of_group = |which: &Which| which.group == collective.group;
        match self.passed.iter().position(of_group) {
            // Waited for later than one that began after it.
            Some(place) if self.passed[place].sequence > collective.sequence => {}
            Some(place) => {
                let last = self.passed.len() - 1;
                self.passed.swap(place, last);
                self.passed[last].advance(collective);
            }
            None => self.passed.push(Which::of(collective)),
        }
    }

    fn span(&mut self, span: Span, capacity: usize) {
        let total = &mut self.by_span[span.kind.index()];
        total.count += 1;
        total.duration_ns += span.duration_ns();
        remember(&mut self.spans, span, capacity);
    }

    fn operator(&mut self, operator: Operator, capacity: usize) {
        self.of_operators.count += 1;
        self.of_operators.flops += operator.flops;
        remember(&mut self.operators, operator, capacity);
    }

    fn allocation(&mut self, allocation: Allocation, capacity: usize) {
        let total = &mut self.by_memory[allocation.kind.index()];
        let bytes = allocation.bytes.unsigned_abs();
        if allocation.bytes < 0 {
            total.released_bytes += bytes;
        } else {
            total.num_allocations += 1;
            total.allocated_bytes += bytes;
        }
        remember(&mut self.allocations, allocation, capacity);
    }

    fn totals(&self) -> Totals {
        let collectives = CollectiveKind::ALL
            .into_iter()
            .flat_map(|kind| Purpose::ALL.map(|purpose| (kind, purpose)))
            .map(|(kind, purpose)| ((kind, purpose), self.by_kind[kind.index()][purpose.index()]))
            .filter(|(_, total)| *total != Total::default())
            .collect();
        Totals {
            collectives,
            moving_ns: occurring(Purpose::ALL, self.moving_ns),
            waited_ns: self.waited_ns,
            spans: occurring(SpanKind::ALL, self.by_span),
            operators: self.of_operators,
            memory: occurring(MemoryKind::ALL, self.by_memory),
        }
    }

    fn events(&self, rank: usize) -> Events {
        Events {
            rank,
            collectives: self.collectives.iter().cloned().collect(),
            spans: self.spans.iter().cloned().collect(),
            operators: self.operators.iter().cloned().collect(),
            allocations: self.allocations.iter().copied().collect(),
        }
    }
}

fn remember<T>(events: &mut VecDeque<T>, event: T, capacity: usize) {
    if events.len() >= capacity {
        events.pop_front();
    }
    events.push_back(event);
}

fn occurring<K: Ord, T: Default + PartialEq, const N: usize>(
    kinds: [K; N],
    totals: [T; N],
) -> BTreeMap<K, T> {
    kinds
        .into_iter()
        .zip(totals)
        .filter(|(_, total)| *total != T::default())
        .collect()
}

//! The flight recorder of a rank.
//!
//! A ledger always counts, because counting is cheap, and always keeps the last events of each kind, because
//! they explain a hang. It keeps every event only if it was created to record.

use std::{
    collections::{BTreeMap, VecDeque},
    path::Path,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use crate::{
    Allocation, Collective, CollectiveId, CollectiveKind, DeviceClock, DeviceInterval, DevicePoint,
    Events, MemoryKind, MemoryTotal, OnDevice, Operator, OperatorTotal, Purpose, Span, SpanGuard,
    SpanKind, SpanTotal, Total, Totals, TraceError, clock, write_chrome,
};

/// The number of events of each kind that a ledger keeps when it does not record.
const CAPACITY: usize = 1024;

/// The flight recorder of a rank: counters of everything, and the most recent events. A handle that is cheap
/// to clone and shared between threads.
#[derive(Clone, Debug)]
pub struct Ledger(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    rank: usize,
    capacity: usize,
    next_id: AtomicU64,
    device_clock: OnceLock<Box<dyn DeviceClock>>,
    state: Mutex<State>,
}

/// Identifies a pending collective between [`Ledger::begin`] and [`Ledger::finish`].
#[must_use = "a collective that is never finished is reported as hanging"]
#[derive(Debug, Eq, PartialEq)]
pub struct CollectiveHandle(u64);

impl Ledger {
    /// Creates a ledger that counts everything and keeps the last events.
    pub fn new(rank: usize) -> Ledger {
        Ledger::with_capacity(rank, CAPACITY)
    }

    /// Creates a ledger that counts everything and keeps every event.
    pub fn recording(rank: usize) -> Ledger {
        Ledger::with_capacity(rank, usize::MAX)
    }

    fn with_capacity(rank: usize, capacity: usize) -> Ledger {
        let (next_id, state) = (AtomicU64::new(0), Mutex::default());
        Ledger(Arc::new(Shared {
            rank,
            capacity,
            next_id,
            device_clock: OnceLock::new(),
            state,
        }))
    }

    /// The rank that this ledger belongs to.
    pub fn rank(&self) -> usize {
        self.0.rank
    }

    /// Whether the ledger keeps every event.
    pub fn is_recording(&self) -> bool {
        self.0.capacity == usize::MAX
    }

    /// The current time in nanoseconds since 1970: aligned between the ranks of a node, monotonic within a
    /// rank.
    pub fn now_ns(&self) -> u64 {
        clock::now_ns()
    }

    /// Takes the times of spans of compute and of collectives from a device from now on, if the ledger records.
    pub fn set_device_clock(&self, clock: Box<dyn DeviceClock>) {
        if self.is_recording() {
            // The first clock stays: a rank has one device.
            let _ = self.0.device_clock.set(clock);
        }
    }

    /// The clock of the device, if there is one.
    pub fn device_clock(&self) -> Option<&dyn DeviceClock> {
        self.0.device_clock.get().map(Box::as_ref)
    }

    /// Records a completed collective.
    pub fn collective(&self, collective: Collective) {
        let mut state = self.state();
        state.set_last_completed(&collective);
        state.collective(collective, self.0.capacity);
    }

    /// Records a collective that has been issued. It is counted when it is [finished](Self::finish).
    pub fn begin(&self, collective: Collective) -> CollectiveHandle {
        let id = self.0.next_id.fetch_add(1, Ordering::Relaxed);
        self.state().pending.insert(id, collective);
        CollectiveHandle(id)
    }

    /// Records that the caller blocks in `wait` for a pending collective.
    pub fn wait(&self, handle: &CollectiveHandle, since_ns: u64) {
        if let Some(collective) = self.state().pending.get_mut(&handle.0) {
            collective.waited = Some((since_ns, since_ns));
        }
    }

    /// Records the completion of a pending collective. `complete` fills in its end time and other results. If a device
    /// executes it, the host has gone on, and the collective stays pending until `on_device` is done.
    pub fn finish(
        &self,
        handle: CollectiveHandle,
        on_device: OnDevice,
        complete: impl FnOnce(&mut Collective),
    ) {
        let mut state = self.state();
        if let Some(mut collective) = state.pending.remove(&handle.0) {
            complete(&mut collective);
            let OnDevice { interval, done } = on_device;
            state.complete_executed();
            match done {
                Some(done) => push(&mut state.queued, (collective.clone(), done), CAPACITY),
                None => state.set_last_completed(&collective),
            }
            let index = state.collectives.len();
            let on_device = interval.map(|interval| (index, interval));
            state.device_collectives.extend(on_device);
            state.collective(collective, self.0.capacity);
        }
    }

    /// The collectives that were issued and are not complete, oldest first: those that a device still has to execute,
    /// then those that the host waits for.
    pub fn pending(&self) -> Vec<Collective> {
        let mut state = self.state();
        state.complete_executed();
        let queued = state.queued.iter().map(|(collective, _)| collective);
        queued.chain(state.pending.values()).cloned().collect()
    }

    /// The last completed collective of each group; the most recent one is the last element.
    pub fn last_completed(&self) -> Vec<CollectiveId> {
        let mut state = self.state();
        state.complete_executed();
        state.last_completed.clone()
    }

    /// The time that callers have blocked in `wait` since the ledger was created or reset.
    pub fn waited_ns(&self) -> u64 {
        self.state().waited_ns
    }

    /// Records a span.
    pub fn span(&self, span: Span) {
        self.state().span(span, self.0.capacity);
    }

    /// Records a span, whose times on a device are those of `interval`.
    pub(crate) fn span_on_device(&self, span: Span, interval: Option<DeviceInterval>) {
        let mut state = self.state();
        let index = state.spans.len();
        let on_device = interval.map(|interval| (index, interval));
        state.device_spans.extend(on_device);
        state.span(span, self.0.capacity);
    }

    /// Begins a span that ends when the guard is dropped.
    pub fn enter(&self, kind: SpanKind, name: impl Into<String>) -> SpanGuard<'_> {
        SpanGuard::open(self, kind, name.into())
    }

    /// Records an allocation or a release of memory.
    pub fn allocation(&self, allocation: Allocation) {
        self.state().allocation(allocation, self.0.capacity);
    }

    /// Records an operator call.
    pub fn operator(&self, operator: Operator) {
        self.state().operator(operator, self.0.capacity);
    }

    /// The counters since the ledger was created or reset.
    pub fn totals(&self) -> Totals {
        self.state().totals()
    }

    /// The bytes sent since the ledger was created or reset, by group and purpose.
    pub fn sent_bytes(&self) -> Vec<(String, Purpose, u64)> {
        self.state().sent_bytes()
    }

    /// A copy of the kept events. With a device clock, it waits for the device.
    pub fn events(&self) -> Events {
        let mut state = self.state();
        state.set_device_times();
        state.events(self.0.rank)
    }

    /// Clears counters and events. Pending collectives and the last completed ones stay, because they describe
    /// the present.
    pub fn reset(&self) {
        let mut state = self.state();
        let pending = std::mem::take(&mut state.pending);
        let queued = std::mem::take(&mut state.queued);
        let last_completed = std::mem::take(&mut state.last_completed);
        *state = State {
            pending,
            queued,
            last_completed,
            ..State::default()
        };
    }

    /// Writes the kept events as a trace for Perfetto or `chrome://tracing`.
    pub fn write_chrome(&self, path: impl AsRef<Path>) -> Result<(), TraceError> {
        write_chrome(path, &[self.events()])
    }

    /// Ignores poisoning: counters that a panicking thread left half-updated do no harm.
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The counters, by the indices of kinds and purposes, and the kept events.
#[derive(Debug, Default)]
struct State {
    by_kind: [[Total; Purpose::COUNT]; CollectiveKind::COUNT],
    communication_ns: [u64; Purpose::COUNT],
    /// The sent bytes of each group, by the index of their purpose.
    by_group: Vec<(String, [u64; Purpose::COUNT])>,
    waited_ns: u64,
    by_span: [SpanTotal; SpanKind::COUNT],
    by_memory: [MemoryTotal; MemoryKind::COUNT],
    operator_total: OperatorTotal,
    pending: BTreeMap<u64, Collective>,
    /// Collectives that the host has gone on from, each with a point that the device reaches after it.
    queued: VecDeque<(Collective, Box<dyn DevicePoint>)>,
    /// One per group, the most recent last.
    last_completed: Vec<CollectiveId>,
    collectives: VecDeque<Collective>,
    spans: VecDeque<Span>,
    /// Collectives and spans, by their indices, that still have the host's times. Only ledgers that record have them,
    /// and those drop no events, so indices stay.
    device_collectives: Vec<(usize, DeviceInterval)>,
    device_spans: Vec<(usize, DeviceInterval)>,
    operators: VecDeque<Operator>,
    allocations: VecDeque<Allocation>,
}

impl State {
    fn collective(&mut self, collective: Collective, capacity: usize) {
        let total = &mut self.by_kind[collective.kind.index()][collective.purpose.index()];
        total.count += 1;
        total.payload_bytes += collective.payload_bytes;
        total.sent_bytes += collective.sent_bytes;
        self.communication_ns[collective.purpose.index()] += collective.duration_ns();
        self.waited_ns += collective.waited_ns();
        self.add_to_group(&collective);
        push(&mut self.collectives, collective, capacity);
    }

    /// Linear search: a rank has few groups.
    fn add_to_group(&mut self, collective: &Collective) {
        let in_group = |(group, _): &(String, _)| *group == collective.group;
        let index = self.by_group.iter().position(in_group);
        let index = index.unwrap_or_else(|| {
            let group = collective.group.clone();
            self.by_group.push((group, [0; Purpose::COUNT]));
            self.by_group.len() - 1
        });
        self.by_group[index].1[collective.purpose.index()] += collective.sent_bytes;
    }

    /// Linear search: a rank has few groups. Point-to-point operations are excluded, because their sequence
    /// numbers are separate.
    fn set_last_completed(&mut self, collective: &Collective) {
        if collective.kind.is_point_to_point() {
            return;
        }
        let in_group = |id: &CollectiveId| id.group == collective.group;
        match self.last_completed.iter().position(in_group) {
            // The caller waited for it after a later one.
            Some(index) if self.last_completed[index].sequence > collective.sequence => {}
            Some(index) => {
                let last = self.last_completed.len() - 1;
                self.last_completed.swap(index, last);
                self.last_completed[last].advance(collective);
            }
            None => self.last_completed.push(CollectiveId::of(collective)),
        }
    }

    fn span(&mut self, span: Span, capacity: usize) {
        let total = &mut self.by_span[span.kind.index()];
        total.count += 1;
        total.duration_ns += span.duration_ns();
        push(&mut self.spans, span, capacity);
    }

    fn operator(&mut self, operator: Operator, capacity: usize) {
        self.operator_total.count += 1;
        self.operator_total.flops += operator.flops;
        push(&mut self.operators, operator, capacity);
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
        push(&mut self.allocations, allocation, capacity);
    }

    /// Completes the collectives that the device has executed. It executes them in order, so the first that it has not
    /// executed ends the search.
    fn complete_executed(&mut self) {
        while let Some((collective, _)) = self.queued.pop_front_if(|(_, done)| done.is_reached()) {
            self.set_last_completed(&collective);
        }
    }

    /// Replaces the host's times by those of the device.
    fn set_device_times(&mut self) {
        for (index, interval) in std::mem::take(&mut self.device_spans) {
            if let (Some(span), Some(times)) = (self.spans.get_mut(index), interval.times_ns()) {
                (span.started_ns, span.ended_ns) = times;
            }
        }
        let collectives = std::mem::take(&mut self.device_collectives);
        if collectives.is_empty() {
            return;
        }
        for (index, interval) in collectives {
            let collective = self.collectives.get_mut(index);
            if let (Some(collective), Some(times)) = (collective, interval.times_ns()) {
                (collective.started_ns, collective.ended_ns) = times;
            }
        }
        start_after_predecessors(&mut self.collectives);
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
            communication_ns: non_default(Purpose::ALL, self.communication_ns),
            waited_ns: self.waited_ns,
            spans: non_default(SpanKind::ALL, self.by_span),
            operators: self.operator_total,
            memory: non_default(MemoryKind::ALL, self.by_memory),
        }
    }

    fn sent_bytes(&self) -> Vec<(String, Purpose, u64)> {
        let groups = self.by_group.iter().flat_map(|(group, by_purpose)| {
            let purposes = Purpose::ALL.into_iter().zip(by_purpose);
            purposes.map(|(purpose, bytes)| (group.clone(), purpose, *bytes))
        });
        groups.filter(|(_, _, bytes)| *bytes > 0).collect()
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

/// Collectives of a group run one after another: none starts before the one before it has ended. Where it was queued
/// earlier, its start is corrected.
fn start_after_predecessors(collectives: &mut VecDeque<Collective>) {
    let mut order: Vec<usize> = (0..collectives.len())
        .filter(|&index| !collectives[index].kind.is_point_to_point())
        .collect();
    let key = |index: usize| (&collectives[index].group, collectives[index].sequence);
    order.sort_by(|&a, &b| key(a).cmp(&key(b)));
    for pair in order.windows(2) {
        let [before, after] = [pair[0], pair[1]].map(|index| &collectives[index]);
        if before.group == after.group {
            let earliest = before.ended_ns.min(after.ended_ns);
            let started = after.started_ns.max(earliest);
            collectives[pair[1]].started_ns = started;
        }
    }
}

/// Appends an event and drops the oldest one beyond the capacity.
fn push<T>(events: &mut VecDeque<T>, event: T, capacity: usize) {
    if events.len() >= capacity {
        events.pop_front();
    }
    events.push_back(event);
}

/// The totals that are not zero, by kind.
fn non_default<K: Ord, T: Default + PartialEq, const N: usize>(
    kinds: [K; N],
    totals: [T; N],
) -> BTreeMap<K, T> {
    kinds
        .into_iter()
        .zip(totals)
        .filter(|(_, total)| *total != T::default())
        .collect()
}

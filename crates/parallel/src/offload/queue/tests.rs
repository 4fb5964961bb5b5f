//! Model-based tests of the queue under any order of events.

use proptest::prelude::*;

use super::*;

const NUM_RECORDS: usize = 5;

#[derive(Debug, Clone, Copy)]
enum Event {
    Prefetch(usize),
    Claim(usize),
    Put(usize),
    Release(usize),
    BeginRead,
    EndRead,
    BeginWrite,
    EndWrite,
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let record = 0..NUM_RECORDS;
    let event = prop_oneof![
        record.clone().prop_map(Event::Prefetch),
        record.clone().prop_map(Event::Claim),
        record.clone().prop_map(Event::Put),
        record.prop_map(Event::Release),
        Just(Event::BeginRead),
        Just(Event::EndRead),
        Just(Event::BeginWrite),
        Just(Event::EndWrite),
    ];
    proptest::collection::vec(event, 0..200)
}

/// The caller, reader and writer of a queue. Checksums count the writes of a record.
struct Harness {
    queue: Queue<usize>,
    num_buffers: usize,
    taken: Vec<(usize, usize)>,
    reading: Option<(usize, usize)>,
    writing: Option<(usize, usize)>,
    num_put: [u32; NUM_RECORDS],
}

impl Harness {
    fn new(num_buffers: usize) -> Harness {
        Harness {
            queue: Queue::new(NUM_RECORDS, (0..num_buffers).collect()),
            num_buffers,
            taken: Vec::new(),
            reading: None,
            writing: None,
            num_put: [0; NUM_RECORDS],
        }
    }

    fn is_taken(&self, record: usize) -> bool {
        self.taken.iter().any(|&(taken, _)| taken == record)
    }

    fn remove_taken(&mut self, record: usize) -> Option<usize> {
        let at = self.taken.iter().position(|&(taken, _)| taken == record)?;
        Some(self.taken.swap_remove(at).1)
    }

    fn apply(&mut self, event: Event) {
        match event {
            Event::Prefetch(record) => {
                let is_taken = self.is_taken(record);
                assert_eq!(self.queue.prefetch(record) == Prefetch::Taken, is_taken);
            }
            Event::Claim(record) => drop(self.claim(record)),
            Event::Put(record) => {
                if let Some(buffer) = self.remove_taken(record) {
                    self.num_put[record] += 1;
                    self.queue.put(record, buffer);
                }
            }
            Event::Release(record) => {
                if let Some(buffer) = self.remove_taken(record) {
                    self.queue.release(record, buffer);
                }
            }
            Event::BeginRead => drop(self.begin_read()),
            Event::EndRead => drop(self.end_read()),
            Event::BeginWrite => drop(self.begin_write()),
            Event::EndWrite => drop(self.end_write()),
        }
    }

    /// Whether the caller has to wait.
    fn claim(&mut self, record: usize) -> bool {
        let (was_taken, num_taken) = (self.is_taken(record), self.taken.len());
        match self.queue.claim(record) {
            Claim::Ready(buffer) => self.taken.push((record, buffer)),
            Claim::Wait => return true,
            Claim::Taken => assert!(was_taken),
            Claim::NoBuffer => assert_eq!(num_taken, self.num_buffers),
            Claim::Failed(e) => panic!("a read failed: {e}"),
        }
        false
    }

    fn begin_read(&mut self) -> bool {
        if self.reading.is_some() {
            return false;
        }
        let Some((record, buffer, content)) = self.queue.next_read() else {
            return false;
        };
        let expected = match self.num_put[record] {
            0 => Content::Zeros,
            count => Content::Written(count),
        };
        assert_eq!(
            content, expected,
            "a read of {record} must see its last write"
        );
        self.reading = Some((record, buffer));
        true
    }

    fn end_read(&mut self) -> bool {
        let ended = self.reading.take();
        ended
            .map(|(record, buffer)| self.queue.read_done(record, buffer, Ok(())))
            .is_some()
    }

    fn begin_write(&mut self) -> bool {
        if self.writing.is_none() {
            self.writing = self.queue.next_write();
            return self.writing.is_some();
        }
        false
    }

    fn end_write(&mut self) -> bool {
        let Some((record, buffer)) = self.writing.take() else {
            return false;
        };
        let content = Content::Written(self.num_put[record]);
        self.queue.write_done(record, buffer, content);
        true
    }

    /// Advances the reader or the writer by one step, if possible.
    fn work(&mut self) -> bool {
        self.end_read() || self.end_write() || self.begin_read() || self.begin_write()
    }

    /// All buffers, in whatever stage they are.
    fn buffers(&self) -> Vec<usize> {
        let staged = self.queue.slots.iter().filter_map(|slot| match slot.stage {
            Stage::Queued(buffer) | Stage::Ready(buffer) => Some(buffer),
            _ => None,
        });
        let queued = self.queue.writes.iter().map(|&(_, buffer)| buffer);
        let held = self.taken.iter().chain(&self.reading).chain(&self.writing);
        let mut all: Vec<_> = staged
            .chain(queued)
            .chain(held.map(|&(_, buffer)| buffer))
            .chain(self.queue.free.iter().copied())
            .collect();
        all.sort_unstable();
        all
    }
}

proptest! {
    /// Reads see the last write, no buffer is lost or duplicated, and a waiting claim is eventually served.
    #[test]
    fn any_order_of_events_keeps_the_invariants(
        num_buffers in 1usize..4,
        events in events(),
        last in 0..NUM_RECORDS,
    ) {
        let mut harness = Harness::new(num_buffers);
        for event in events {
            harness.apply(event);
            prop_assert_eq!(harness.buffers(), (0..num_buffers).collect::<Vec<_>>());
        }
        while harness.claim(last) {
            prop_assert!(harness.work(), "deadlock: waiting for {} with no I/O in progress", last);
        }
    }
}

#[test]
fn a_claim_evicts_the_record_that_is_needed_last() {
    let mut queue = Queue::new(4, vec!['a', 'b', 'c']);
    for record in 0..3 {
        assert_eq!(queue.prefetch(record), Prefetch::Queued);
    }
    assert_eq!(queue.prefetch(3), Prefetch::NoBuffer);
    assert!(matches!(queue.claim(3), Claim::Wait));
    let order: Vec<_> = std::iter::from_fn(|| queue.next_read().map(|read| read.0)).collect();
    assert_eq!(order, [3, 0, 1], "2 was evicted, and 3 is urgent");
}

#[test]
fn a_failed_read_frees_its_buffer_and_is_reported_once() {
    let mut queue = Queue::new(1, vec![()]);
    assert!(matches!(queue.claim(0), Claim::Wait));
    let (record, buffer, _) = queue.next_read().unwrap();
    queue.read_done(
        record,
        buffer,
        Err(OffloadError::NoBuffer { num_buffers: 1 }),
    );
    assert!(matches!(queue.claim(0), Claim::Failed(_)));
    assert!(
        matches!(queue.claim(0), Claim::Wait),
        "the next claim retries"
    );
}

//! The ledger counts everything, keeps the last events, and is cheap.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use trainyard_trace::{
    Allocation, Collective, CollectiveKind, DeviceClock, DeviceInterval, DevicePoint, Ledger,
    MemoryKind, MemoryTotal, OnDevice, Operator, Purpose, Span, SpanKind, Total, current_thread,
};

fn all_reduce(sequence: u64) -> Collective {
    Collective {
        kind: CollectiveKind::AllReduce,
        group: "dp_replicate".to_owned(),
        group_size: 2,
        sequence,
        purpose: Purpose::Gradient,
        dtype: "float32".to_owned(),
        payload_bytes: 100,
        sent_bytes: 100,
        issued_ns: 10,
        started_ns: 20,
        ended_ns: 50,
        waited: Some((30, 50)),
    }
}

#[test]
fn everything_is_counted_and_the_last_events_are_kept() {
    let ledger = Ledger::new(3);
    for sequence in 0..5000 {
        ledger.collective(all_reduce(sequence));
    }
    let totals = ledger.totals();
    assert_eq!(
        totals.collectives[&(CollectiveKind::AllReduce, Purpose::Gradient)],
        Total {
            count: 5000,
            payload_bytes: 500_000,
            sent_bytes: 500_000
        }
    );
    assert_eq!(totals.waited_ns, 100_000);
    assert_eq!(totals.communication_ns[&Purpose::Gradient], 150_000);

    let events = ledger.events();
    assert_eq!(events.rank, 3);
    assert!(events.collectives.len() < 5000);
    assert_eq!(events.collectives.last().unwrap().sequence, 4999);
    assert!(!ledger.is_recording());
}

#[test]
fn a_recording_ledger_keeps_every_event_until_reset() {
    let ledger = Ledger::recording(0);
    for sequence in 0..5000 {
        ledger.collective(all_reduce(sequence));
    }
    assert_eq!(ledger.events().collectives.len(), 5000);
    ledger.reset();
    assert_eq!(ledger.events(), Ledger::recording(0).events());
    assert_eq!(ledger.totals(), Ledger::recording(0).totals());
}

#[test]
fn the_difference_of_totals_is_what_happened_in_between() {
    let ledger = Ledger::new(0);
    ledger.collective(all_reduce(0));
    let before = ledger.totals();
    ledger.collective(all_reduce(1));
    ledger.collective(Collective {
        kind: CollectiveKind::Barrier,
        purpose: Purpose::Control,
        payload_bytes: 0,
        sent_bytes: 0,
        waited: None,
        ..all_reduce(2)
    });
    ledger.span(Span {
        name: "forward".to_owned(),
        kind: SpanKind::Forward,
        started_ns: 5,
        ended_ns: 25,
        thread: 0,
    });
    ledger.operator(Operator {
        name: "aten::mm".to_owned(),
        shapes: vec![vec![2, 2], vec![2, 2]],
        input_bytes: 32,
        output_bytes: 16,
        started_ns: 6,
        ended_ns: 7,
        flops: 16,
        thread: 0,
    });
    let step = ledger.totals() - before;
    assert_eq!(step.of_kind(CollectiveKind::AllReduce).count, 1);
    assert_eq!(step.of_purpose(Purpose::Control).count, 1);
    assert_eq!(step.all_collectives().sent_bytes, 100);
    assert_eq!(step.spans[&SpanKind::Forward].duration_ns, 20);
    assert_eq!(step.operators.flops, 16);
}

#[test]
fn allocations_and_releases_are_counted() {
    let ledger = Ledger::new(0);
    for bytes in [64, 36, -100] {
        ledger.allocation(Allocation {
            kind: MemoryKind::Gradient,
            bytes,
            at_ns: 1,
        });
    }
    assert_eq!(
        ledger.totals().memory[&MemoryKind::Gradient],
        MemoryTotal {
            num_allocations: 2,
            allocated_bytes: 100,
            released_bytes: 100
        }
    );
}

#[test]
fn an_unfinished_collective_is_pending() {
    let ledger = Ledger::new(0);
    let first = ledger.begin(all_reduce(0));
    let second = ledger.begin(all_reduce(1));
    assert_eq!(ledger.totals().all_collectives().count, 0);
    ledger.finish(first, OnDevice::default(), |collective| {
        collective.ended_ns = 99
    });
    ledger.reset();
    assert_eq!(ledger.pending(), [all_reduce(1)]);
    ledger.finish(second, OnDevice::default(), |collective| {
        collective.ended_ns = 100
    });
    assert!(ledger.pending().is_empty());
    assert_eq!(ledger.events().collectives[0].ended_ns, 100);
    assert_eq!(ledger.totals().all_collectives().count, 1);
}

#[test]
fn spans_end_with_their_guard_and_nest() {
    let ledger = Ledger::recording(0);
    {
        let _step = ledger.enter(SpanKind::Step, "step 1");
        let _forward = ledger.enter(SpanKind::Forward, "forward");
    }
    let [forward, step] = &ledger.events().spans[..] else {
        panic!("two spans were opened");
    };
    assert_eq!(
        (forward.kind, step.kind),
        (SpanKind::Forward, SpanKind::Step)
    );
    assert!(step.started_ns <= forward.started_ns && forward.ended_ns <= step.ended_ns);
    assert_eq!(step.thread, current_thread());
}

#[test]
fn the_clock_shows_wall_time_and_is_monotonic() {
    let ledger = Ledger::new(0);
    let wall = std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64;
    assert!(ledger.now_ns().abs_diff(wall) < 1_000_000_000);
    let times: Vec<u64> = (0..10_000).map(|_| ledger.now_ns()).collect();
    assert!(times.is_sorted());
}

#[test]
fn threads_share_one_ledger() {
    let ledger = Ledger::new(0);
    let numbers: Vec<u64> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    (0..1000).for_each(|sequence| ledger.clone().collective(all_reduce(sequence)));
                    current_thread()
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    assert_eq!(ledger.totals().all_collectives().count, 4000);
    assert!((0..4).all(|a| (0..a).all(|b| numbers[a] != numbers[b])));
}

/// Measures the best of many batches, so that a busy host does not affect the result.
#[test]
fn counting_a_collective_takes_less_than_a_microsecond() {
    const BATCH: u32 = 1000;
    let ledger = Ledger::new(0);
    let best = (0..50)
        .map(|_| {
            let start = Instant::now();
            (0..u64::from(BATCH)).for_each(|sequence| ledger.collective(all_reduce(sequence)));
            start.elapsed() / BATCH
        })
        .min()
        .unwrap();
    println!("{best:?} per collective");
    assert!(best < Duration::from_micros(1), "{best:?} per collective");
}

/// A device whose clock advances by ten with every mark.
#[derive(Debug, Default)]
struct FakeClock(AtomicU64);

#[derive(Debug)]
struct FakePoint(u64);

impl DevicePoint for FakePoint {
    fn is_reached(&self) -> bool {
        true
    }

    fn time_ns(&self) -> Option<u64> {
        Some(self.0)
    }
}

impl DeviceClock for FakeClock {
    fn mark(&self) -> Option<Box<dyn DevicePoint>> {
        let time = self.0.fetch_add(10, Ordering::Relaxed);
        Some(Box::new(FakePoint(time)))
    }

    fn mark_after(&self, join: &mut dyn FnMut()) -> Option<Box<dyn DevicePoint>> {
        join();
        self.mark()
    }
}

#[test]
fn spans_of_compute_have_the_times_of_the_device() {
    let ledger = Ledger::recording(0);
    ledger.set_device_clock(Box::new(FakeClock::default()));
    drop(ledger.enter(SpanKind::Forward, "forward"));
    drop(ledger.enter(SpanKind::Data, "data"));
    drop(ledger.enter(SpanKind::Backward, "backward"));
    let spans = ledger.events().spans;
    assert_eq!((spans[0].started_ns, spans[0].ended_ns), (0, 10));
    assert_eq!((spans[2].started_ns, spans[2].ended_ns), (20, 30));
    assert!(spans[1].started_ns > 30, "the host loads data");
}

#[test]
fn a_collective_starts_when_the_one_before_it_in_its_group_has_ended() {
    let ledger = Ledger::recording(0);
    let points = |from, to| {
        let interval = DeviceInterval {
            from: Box::new(FakePoint(from)),
            to: Box::new(FakePoint(to)),
            joined: Some(Box::new(FakePoint(300))),
        };
        OnDevice {
            interval: Some(interval),
            done: None,
        }
    };
    let [first, second] = [0, 1].map(|sequence| ledger.begin(all_reduce(sequence)));
    // Queued together, and waited for in the other order.
    ledger.finish(second, points(100, 305), |_| {});
    ledger.finish(first, points(100, 200), |_| {});
    let collectives = ledger.events().collectives;
    let times = collectives
        .iter()
        .map(|each| (each.started_ns, each.ended_ns));
    assert_eq!(times.collect::<Vec<_>>(), [(200, 300), (100, 200)]);
}

/// A point that a test decides about.
#[derive(Debug, Default, Clone)]
struct Switch(Arc<AtomicBool>);

impl DevicePoint for Switch {
    fn is_reached(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    fn time_ns(&self) -> Option<u64> {
        None
    }
}

#[test]
fn a_collective_is_pending_until_the_device_has_executed_it() {
    let ledger = Ledger::new(0);
    let done = Switch::default();
    let handle = ledger.begin(all_reduce(0));
    let on_device = OnDevice {
        interval: None,
        done: Some(Box::new(done.clone())),
    };
    ledger.finish(handle, on_device, |_| {});
    assert_eq!(ledger.pending(), [all_reduce(0)]);
    assert!(ledger.last_completed().is_empty());
    done.0.store(true, Ordering::Relaxed);
    assert!(ledger.pending().is_empty());
    assert_eq!(ledger.last_completed().len(), 1);
}

#[test]
fn a_ledger_that_does_not_record_asks_no_device() {
    let ledger = Ledger::new(0);
    ledger.set_device_clock(Box::new(FakeClock::default()));
    assert!(ledger.device_clock().is_none());
}

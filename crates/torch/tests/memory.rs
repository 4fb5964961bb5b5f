//! Every allocation counted, by kind, on CPU and on meta alike.

mod numbers;

use std::panic::catch_unwind;

use numbers::alone;
use trainyard_torch::memory::{KINDS, MemoryReport, observe, record, report, reset_peak, scope};
use trainyard_torch::{Device, Kind, Tensor, kernel, meta};
use trainyard_trace::{Allocation, MemoryKind};

fn floats(count: i64) -> Tensor {
    Tensor::zeros([count], (Kind::Float, Device::Cpu))
}

fn held(kind: MemoryKind) -> u64 {
    let index = KINDS.iter().position(|&each| each == kind).unwrap();
    report().unwrap().held[index]
}

#[test]
fn bytes_count_as_the_kind_they_were_allocated_as_until_released() {
    let _alone = alone();
    observe();
    for kind in KINDS {
        let before = held(kind);
        let tensor = scope(kind, || floats(250));
        assert_eq!(held(kind), before + 1000, "{kind:?}");
        // Released elsewhere, but still of its kind.
        scope(MemoryKind::Communication, || drop(tensor));
        assert_eq!(held(kind), before, "{kind:?}");
    }
}

#[test]
fn scopes_nest_and_end_even_by_a_panic() {
    let _alone = alone();
    observe();
    let (outer, inner) = (MemoryKind::Gradient, MemoryKind::Optimizer);
    let before = [held(outer), held(inner), held(MemoryKind::Other)];
    let _kept = scope(outer, || {
        let first = floats(10);
        let second = scope(inner, || floats(20));
        let third = floats(30);
        let panicked = catch_unwind(|| scope(inner, || panic!("stop")));
        assert!(panicked.is_err());
        [first, second, third, floats(40)]
    });
    let _outside = floats(50);
    assert_eq!(held(outer), before[0] + 4 * (10 + 30 + 40));
    assert_eq!(held(inner), before[1] + 4 * 20);
    assert_eq!(held(MemoryKind::Other), before[2] + 4 * 50);
}

#[test]
fn a_scope_is_of_its_thread() {
    let _alone = alone();
    observe();
    let before = held(MemoryKind::Parameter);
    let elsewhere = scope(MemoryKind::Parameter, || {
        std::thread::spawn(|| floats(100)).join().unwrap()
    });
    assert_eq!(held(MemoryKind::Parameter), before);
    drop(elsewhere);
}

#[test]
fn the_peak_is_the_most_that_was_held_at_once() {
    let _alone = alone();
    observe();
    let base = report().unwrap().total;
    reset_peak();
    assert_eq!(report().unwrap().peak, base);
    drop(floats(1000));
    let small = scope(MemoryKind::Gradient, || floats(100));
    drop(scope(MemoryKind::Activation, || floats(1000)));
    drop(floats(500));
    let MemoryReport {
        at_peak,
        total,
        peak,
        ..
    } = report().unwrap();
    assert_eq!(total, base + 400);
    assert_eq!(peak, base + 4400);
    assert_eq!(at_peak.iter().sum::<u64>(), peak);
    assert!(
        at_peak[3] >= 4000,
        "activations were what was held: {at_peak:?}"
    );
    drop(small);
    reset_peak();
    assert_eq!(report().unwrap().peak, base);
}

#[test]
fn a_record_holds_every_allocation_and_release_in_order() {
    let _alone = alone();
    observe();
    let early = scope(MemoryKind::Parameter, || floats(7));
    let ((), events) = record(|| {
        let tensor = scope(MemoryKind::Gradient, || floats(5));
        drop(early);
        drop(tensor);
    });
    let steps: Vec<_> = events.iter().map(|e| (e.kind, e.bytes)).collect();
    let expected = [
        (MemoryKind::Gradient, 20),
        (MemoryKind::Parameter, -28),
        (MemoryKind::Gradient, -20),
    ];
    assert_eq!(steps, expected);
    assert!(events.is_sorted_by_key(|event| event.at_ns));
    drop(floats(9));
    assert!(
        record(|| ()).1.is_empty(),
        "nothing between records is kept"
    );
}

#[test]
fn a_record_that_panicked_leaves_nothing_behind() {
    let _alone = alone();
    observe();
    let panicked = catch_unwind(|| {
        record(|| {
            drop(floats(3));
            panic!("stop")
        })
    });
    assert!(panicked.is_err());
    drop(floats(4));
    assert!(record(|| ()).1.is_empty());
}

/// A block of a transformer, forward and backward, on whatever device its tensors are.
fn block(make: &dyn Fn(&[i64]) -> Tensor) {
    let (batch, sequence, heads, width) = (2, 64, 4, 16);
    let hidden = heads * width;
    let weight = |shape: &[i64]| {
        let tensor = scope(MemoryKind::Parameter, || make(shape));
        tensor.set_requires_grad(true)
    };
    let (norm, project) = (weight(&[hidden]), weight(&[3 * hidden, hidden]));
    let (up, down) = (weight(&[4 * hidden, hidden]), weight(&[hidden, 4 * hidden]));
    scope(MemoryKind::Activation, || {
        let x = make(&[batch, sequence, hidden]);
        let normed = kernel::rms_norm(&x, &norm, 1e-5).unwrap();
        let qkv = normed.linear::<Tensor>(&project, None).chunk(3, -1);
        let split = |t: &Tensor| t.view([batch, sequence, heads, width]).transpose(1, 2);
        let (q, k, v) = (split(&qkv[0]), split(&qkv[1]), split(&qkv[2]));
        let attended = kernel::attention(&q, &k, &v, true).unwrap();
        let flat = attended.transpose(1, 2).reshape([batch, sequence, hidden]);
        let inner = (x + flat).linear::<Tensor>(&up, None).silu();
        let out = inner.linear::<Tensor>(&down, None);
        let loss = out.square().sum(Kind::Float);
        scope(MemoryKind::Gradient, || loss.backward());
    });
}

fn peak_of(events: &[Allocation]) -> i64 {
    let running = events.iter().scan(0, |held, event| {
        *held += event.bytes;
        Some(*held)
    });
    running.max().unwrap_or(0)
}

#[test]
fn meta_and_cpu_agree_on_the_memory_of_the_same_code() {
    let _alone = alone();
    observe();
    let on_cpu = |shape: &[i64]| Tensor::zeros(shape, (Kind::Float, Device::Cpu));
    let on_meta = |shape: &[i64]| meta::empty(shape, Kind::Float).unwrap();
    block(&on_cpu); // whatever libtorch makes once and keeps
    let ((), cpu) = record(|| block(&on_cpu));
    let ((), meta) = record(|| block(&on_meta));
    for kind in KINDS {
        let taken = |events: &[Allocation]| -> i64 {
            let of_kind = events.iter().filter(|e| e.kind == kind && e.bytes > 0);
            of_kind.map(|e| e.bytes).sum()
        };
        println!("{kind:?}: {} on CPU, {} on meta", taken(&cpu), taken(&meta));
    }
    let (real, dry) = (peak_of(&cpu), peak_of(&meta));
    let off = (real - dry).abs() as f64 / real as f64;
    assert!(off <= 0.02, "the peak is {real} on CPU and {dry} on meta");
}

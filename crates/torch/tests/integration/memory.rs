//! Memory accounting by kind, on CPU and on meta.

use std::panic::catch_unwind;

use crate::numbers::exclusive;
use trainyard_torch::memory::{KINDS, MemoryReport, observe, record, report, reset_peak, scope};
use trainyard_torch::{Device, Kind, Tensor, kernel, meta};
use trainyard_trace::{Allocation, MemoryKind};

fn floats(count: i64) -> Tensor {
    Tensor::zeros([count], (Kind::Float, Device::Cpu))
}

fn allocated(kind: MemoryKind) -> u64 {
    let index = KINDS.iter().position(|&each| each == kind).unwrap();
    report().unwrap().allocated[index]
}

#[test]
fn bytes_count_as_the_kind_of_their_allocation_until_released() {
    let _exclusive = exclusive();
    observe();
    for kind in KINDS {
        let before = allocated(kind);
        let tensor = scope(kind, || floats(250));
        assert_eq!(allocated(kind), before + 1000, "{kind:?}");
        // Released on another thread, but counted as its kind.
        scope(MemoryKind::Communication, || drop(tensor));
        assert_eq!(allocated(kind), before, "{kind:?}");
    }
}

#[test]
fn scopes_nest_and_end_even_on_a_panic() {
    let _exclusive = exclusive();
    observe();
    let (outer, inner) = (MemoryKind::Gradient, MemoryKind::Optimizer);
    let before = [
        allocated(outer),
        allocated(inner),
        allocated(MemoryKind::Other),
    ];
    let _kept = scope(outer, || {
        let first = floats(10);
        let second = scope(inner, || floats(20));
        let third = floats(30);
        let panicked = catch_unwind(|| scope(inner, || panic!("stop")));
        assert!(panicked.is_err());
        [first, second, third, floats(40)]
    });
    let _outside = floats(50);
    assert_eq!(allocated(outer), before[0] + 4 * (10 + 30 + 40));
    assert_eq!(allocated(inner), before[1] + 4 * 20);
    assert_eq!(allocated(MemoryKind::Other), before[2] + 4 * 50);
}

#[test]
fn a_scope_applies_to_its_thread_only() {
    let _exclusive = exclusive();
    observe();
    let before = allocated(MemoryKind::Parameter);
    let elsewhere = scope(MemoryKind::Parameter, || {
        std::thread::spawn(|| floats(100)).join().unwrap()
    });
    assert_eq!(allocated(MemoryKind::Parameter), before);
    drop(elsewhere);
}

#[test]
fn the_peak_is_the_maximum_of_the_total() {
    let _exclusive = exclusive();
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
        "the peak consists of activations: {at_peak:?}"
    );
    drop(small);
    reset_peak();
    assert_eq!(report().unwrap().peak, base);
}

#[test]
fn a_recording_holds_every_allocation_and_release_in_order() {
    let _exclusive = exclusive();
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
        "nothing between recordings is recorded"
    );
}

#[test]
fn a_recording_that_panicked_leaves_no_records() {
    let _exclusive = exclusive();
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

/// A transformer block, forward and backward, on the device that `make` uses.
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
    let running = events.iter().scan(0, |total, event| {
        *total += event.bytes;
        Some(*total)
    });
    running.max().unwrap_or(0)
}

#[test]
fn meta_and_cpu_agree_on_the_memory_of_the_same_code() {
    let _exclusive = exclusive();
    observe();
    let on_cpu = |shape: &[i64]| Tensor::zeros(shape, (Kind::Float, Device::Cpu));
    let on_meta = |shape: &[i64]| meta::empty(shape, Kind::Float).unwrap();
    block(&on_cpu); // warm-up: libtorch allocates some memory once
    let ((), cpu) = record(|| block(&on_cpu));
    let ((), meta) = record(|| block(&on_meta));
    for kind in KINDS {
        let allocated = |events: &[Allocation]| -> i64 {
            let of_kind = events.iter().filter(|e| e.kind == kind && e.bytes > 0);
            of_kind.map(|e| e.bytes).sum()
        };
        println!(
            "{kind:?}: {} on CPU, {} on meta",
            allocated(&cpu),
            allocated(&meta)
        );
    }
    let (real, dry) = (peak_of(&cpu), peak_of(&meta));
    let off = (real - dry).abs() as f64 / real as f64;
    assert!(off <= 0.02, "the peak is {real} on CPU and {dry} on meta");
}

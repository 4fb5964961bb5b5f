//! Operator recording, with shapes and flops.

use std::panic::catch_unwind;

use crate::numbers::{exclusive, wave};
use trainyard_torch::operators::record;
use trainyard_torch::{Kind, Tensor, kernel, meta};
use trainyard_trace::Operator;

fn named<'a>(operators: &'a [Operator], name: &str) -> &'a Operator {
    operators
        .iter()
        .find(|operator| operator.name == name)
        .unwrap_or_else(|| {
            let names: Vec<_> = operators.iter().map(|o| &o.name).collect();
            panic!("{name} is not among {names:?}")
        })
}

fn flops(operators: &[Operator]) -> u64 {
    operators.iter().map(|operator| operator.flops).sum()
}

#[test]
fn a_matrix_product_has_shapes_and_two_flops_per_multiply_add() {
    let _exclusive = exclusive();
    let (a, b) = (wave(&[2, 3], 0.0), wave(&[3, 4], 0.0));
    let (_, operators) = record(|| a.mm(&b)).unwrap();
    let mm = named(&operators, "aten::mm");
    assert_eq!(mm.shapes, [vec![2, 3], vec![3, 4]]);
    assert_eq!(mm.flops, 2 * 2 * 3 * 4);
    assert!(mm.started_ns <= mm.ended_ns);
}

#[test]
fn an_operator_has_the_bytes_of_its_tensors_and_a_view_has_none() {
    let _exclusive = exclusive();
    let (a, b) = (wave(&[2, 3], 0.0), wave(&[3, 4], 0.0));
    let (_, operators) = record(|| {
        let mut product = a.mm(&b);
        let _ = product.relu_();
        product.transpose(0, 1).split(2, 1)
    })
    .unwrap();
    let bytes = |name| {
        let operator = named(&operators, name);
        (operator.input_bytes, operator.output_bytes)
    };
    assert_eq!(bytes("aten::mm"), (8 * (2 * 3 + 3 * 4), 8 * 2 * 4));
    assert_eq!(bytes("aten::relu_"), (8 * 2 * 4, 8 * 2 * 4));
    for view in ["aten::transpose", "aten::split"] {
        assert_eq!(bytes(view), (0, 0), "{view}");
    }
}

#[test]
fn a_convolution_counts_the_outputs_that_its_stride_leaves() {
    let _exclusive = exclusive();
    let (image, filters) = (wave(&[1, 3, 8, 8], 0.0), wave(&[5, 3, 4, 4], 0.0));
    let convolve = || image.conv2d(&filters, None::<Tensor>, [4, 4], [0, 0], [1, 1], 1);
    let (_, operators) = record(convolve).unwrap();
    assert_eq!(flops(&operators), 2 * (2 * 2) * 5 * (3 * 4 * 4));
}

#[test]
fn operators_that_call_others_contain_them_and_count_no_flops() {
    let _exclusive = exclusive();
    let (x, weight, bias) = (wave(&[5, 3], 0.0), wave(&[4, 3], 0.0), wave(&[4], 0.0));
    let (_, operators) = record(|| x.linear(&weight, Some(&bias))).unwrap();
    let (outer, inner) = (
        named(&operators, "aten::linear"),
        named(&operators, "aten::addmm"),
    );
    assert!(outer.started_ns <= inner.started_ns && inner.ended_ns <= outer.ended_ns);
    assert_eq!(outer.thread, inner.thread);
    assert_eq!(outer.flops, 0);
    assert_eq!(flops(&operators), 2 * 5 * 3 * 4);
    let position = |name| operators.iter().position(|o| o.name == name).unwrap();
    assert!(
        position("aten::addmm") < position("aten::linear"),
        "operators are in order of their ends"
    );
}

#[test]
fn backward_is_recorded_and_costs_twice_the_forward() {
    let _exclusive = exclusive();
    let (a, b) = (wave(&[6, 5], 0.0), wave(&[5, 4], 0.0));
    let (a, b) = (a.set_requires_grad(true), b.set_requires_grad(true));
    let (loss, forward) = record(|| a.mm(&b).sum(Kind::Double)).unwrap();
    let ((), backward) = record(|| loss.backward()).unwrap();
    assert_eq!(flops(&forward), 2 * 6 * 5 * 4);
    assert_eq!(flops(&backward), 2 * flops(&forward));
}

#[test]
fn a_dry_run_counts_the_convolution_flops_of_a_real_run() {
    let _exclusive = exclusive();
    let step = |make: &dyn Fn(&[i64]) -> Tensor| {
        let [x, weight] = [&[2, 3, 8, 8][..], &[4, 3, 3, 3]].map(make);
        let weight = weight.set_requires_grad(true);
        let out = x.conv2d::<Tensor>(&weight, None, [1, 1], [1, 1], [1, 1], 1);
        out.relu().sum(Kind::Float).backward();
    };
    let real = |shape: &[i64]| wave(shape, 0.0).to_kind(Kind::Float);
    let dry = |shape: &[i64]| meta::empty(shape, Kind::Float).unwrap();
    let ((), on_cpu) = record(|| step(&real)).unwrap();
    let ((), on_meta) = record(|| step(&dry)).unwrap();
    let forward = 2 * 2 * (3 * 3 * 3) * 4 * (8 * 8);
    assert!(flops(&on_cpu) >= 2 * forward);
    assert_eq!(flops(&on_meta), flops(&on_cpu));
}

#[test]
fn a_dry_run_counts_the_attention_flops_of_a_real_run() {
    let _exclusive = exclusive();
    let shape = [2, 4, 32, 16];
    let step = |q: Tensor, k: Tensor, v: Tensor| {
        let inputs = [q, k, v].map(|t| t.set_requires_grad(true));
        let out = kernel::attention(&inputs[0], &inputs[1], &inputs[2], true).unwrap();
        out.matmul(&inputs[0].transpose(-2, -1))
            .sum(Kind::Float)
            .backward();
    };
    let real = || wave(&shape, 0.0).to_kind(Kind::Float);
    let dry = || meta::empty(&shape, Kind::Float).unwrap();
    let ((), on_cpu) = record(|| step(real(), real(), real())).unwrap();
    let ((), on_meta) = record(|| step(dry(), dry(), dry())).unwrap();
    assert!(flops(&on_cpu) > 0);
    assert_eq!(flops(&on_meta), flops(&on_cpu));
}

#[test]
fn a_recording_contains_only_its_body_even_after_a_panic() {
    let _exclusive = exclusive();
    let x = wave(&[2, 2], 0.0);
    let _ = x.mm(&x);
    assert!(record(|| ()).unwrap().1.is_empty());
    let panicked = catch_unwind(|| {
        record(|| {
            let x = wave(&[2, 2], 0.0);
            let _ = x.mm(&x);
            panic!("stop")
        })
    });
    assert!(panicked.is_err());
    let _ = x.mm(&x);
    assert!(record(|| ()).unwrap().1.is_empty());
}

//! Meta kernels: shapes and memory of the real kernels, without values.

use crate::numbers::{exclusive, values, wave};
use trainyard_torch::kernel::{self, AdamW, AdamWState, DeviceScalars, Sgd};
use trainyard_torch::{Kind, Tensor, memory, meta};

fn floats(shape: &[i64]) -> Tensor {
    meta::empty(shape, Kind::Float).unwrap()
}

fn integers(shape: &[i64]) -> Tensor {
    meta::empty(shape, Kind::Int64).unwrap()
}

fn leaf(shape: &[i64]) -> Tensor {
    floats(shape).set_requires_grad(true)
}

/// Asserts that backward gives each leaf a gradient of its own shape and type, on meta.
fn assert_gradients(output: &Tensor, leaves: &[&Tensor]) {
    output.sum(output.kind()).backward();
    for leaf in leaves {
        let grad = leaf.grad();
        assert!(grad.defined() && meta::is_meta(&grad));
        assert_eq!((grad.size(), grad.kind()), (leaf.size(), leaf.kind()));
    }
}

/// The peak of allocated bytes during `body`, minus the bytes allocated before.
fn growth(body: impl FnOnce()) -> u64 {
    memory::observe();
    let before = memory::report().unwrap().total;
    memory::reset_peak();
    body();
    memory::report().unwrap().peak - before
}

#[test]
fn attention_has_the_shapes_of_flash_attention() {
    for kind in [Kind::Float, Kind::Double, Kind::BFloat16] {
        let make = |heads| {
            let tensor = meta::empty(&[2, heads, 128, 64], kind).unwrap();
            tensor.set_requires_grad(true)
        };
        let (q, k, v) = (make(8), make(2), make(2));
        let out = kernel::attention(&q, &k, &v, true).unwrap();
        assert_eq!((out.size(), out.kind()), (vec![2, 8, 128, 64], kind));
        assert_gradients(&out, &[&q, &k, &v]);
    }
}

#[test]
fn batch_norm_has_gradients_of_input_and_weights() {
    let none = None::<Tensor>;
    for training in [true, false] {
        let (input, weight, bias) = (leaf(&[4, 3, 8, 8]), leaf(&[3]), leaf(&[3]));
        let (mean, variance) = (floats(&[3]), floats(&[3]));
        let statistics = (Some(&mean), Some(&variance));
        let out = input.batch_norm(
            Some(&weight),
            Some(&bias),
            statistics.0,
            statistics.1,
            training,
            0.1,
            1e-5,
            false,
        );
        assert_eq!(out.size(), input.size());
        assert_gradients(&out, &[&input, &weight, &bias]);
    }
    let plain = leaf(&[4, 3, 8]);
    let out = plain.batch_norm(
        none.as_ref(),
        none.as_ref(),
        none.as_ref(),
        none.as_ref(),
        true,
        0.1,
        1e-5,
        false,
    );
    assert_gradients(&out, &[&plain]);
}

#[test]
fn attention_has_the_strides_of_the_real_kernel() {
    let strides = |x: Tensor| {
        let x = x.set_requires_grad(true);
        let [q, k, v] = [(); 3].map(|()| x.transpose(1, 2).transpose(1, 2));
        let out = kernel::attention(&q, &k, &v, false).unwrap();
        let gradient = Tensor::run_backward(&[out.sum(Kind::Float)], &[&q], false, false);
        (out.stride(), gradient[0].stride())
    };
    let real = |shape: &[i64]| wave(shape, 0.0).to_kind(Kind::Float);
    let (plain, swapped) = ([2, 4, 16, 8], [2, 16, 4, 8]);
    assert_eq!(strides(floats(&plain)), strides(real(&plain)));
    let dry = floats(&swapped).transpose(1, 2);
    assert_eq!(strides(dry), strides(real(&swapped).transpose(1, 2)));
}

#[test]
fn attention_memory_is_linear_in_the_sequence_length() {
    let _exclusive = exclusive();
    let cost = |sequence: i64| {
        let [q, k, v] = [(); 3].map(|()| leaf(&[1, 8, sequence, 64]));
        growth(|| {
            let out = kernel::attention(&q, &k, &v, true).unwrap();
            out.sum(Kind::Float).backward();
        })
    };
    let (short, long) = (cost(1 << 10), cost(1 << 16));
    assert!(long <= 64 * short + 64, "{short} bytes, then {long}");
    // Forward keeps the output and one number per row; backward adds three gradients and its input.
    let row = 8 * (64 * 4 + 4);
    assert!(long <= 6 * (row << 16), "{long}");
    let scores = (4 * 8u64) << 32;
    assert!(
        long < scores / 100,
        "nothing of the size of the scores is allocated"
    );
}

#[test]
fn embeddings_run_forward_and_backward() {
    let weight = leaf(&[1000, 32]);
    let out = Tensor::embedding(&weight, &integers(&[4, 16]), -1, false, false);
    assert_eq!(out.size(), [4, 16, 32]);
    assert_gradients(&out, &[&weight]);
}

#[test]
fn norms_run_forward_and_backward() {
    let (x, weight, bias) = (leaf(&[4, 16, 32]), leaf(&[32]), leaf(&[32]));
    let out = x.layer_norm([32], Some(&weight), Some(&bias), 1e-5, false);
    assert_gradients(&out, &[&x, &weight, &bias]);
    // The statistics are saved in the input's dtype.
    let (_, mean, rstd) = x.native_layer_norm([32], Some(&weight), Some(&bias), 1e-5);
    assert_eq!((mean.size(), rstd.size()), (vec![4, 16, 1], vec![4, 16, 1]));
    let half = x.to_kind(Kind::BFloat16);
    let (out, mean, _) = half.native_layer_norm([32], Some(&weight), None, 1e-5);
    assert_eq!((out.kind(), mean.kind()), (Kind::BFloat16, Kind::Float));
    let x = leaf(&[4, 16, 32]);
    let out = x.layer_norm::<Tensor>([32], None, None, 1e-5, false);
    assert_gradients(&out, &[&x]);
    let (x, weight) = (leaf(&[4, 16, 32]), leaf(&[32]));
    let out = kernel::rms_norm(&x, &weight, 1e-5).unwrap();
    assert_gradients(&out, &[&x, &weight]);
}

#[test]
fn dropout_saves_a_mask_of_one_byte_per_element() {
    let _exclusive = exclusive();
    let x = leaf(&[4, 1024]);
    let (out, mask) = x.native_dropout(0.1, true);
    assert_eq!((out.size(), mask.size()), (vec![4, 1024], vec![4, 1024]));
    assert_eq!((out.kind(), mask.kind()), (Kind::Float, Kind::Bool));
    assert_gradients(&out, &[&x]);
    let grown = growth(|| {
        let _kept = tch::no_grad(|| x.native_dropout(0.1, true));
    });
    assert_eq!(grown, 4096 * 4 + 4096);
}

#[test]
fn index_select_bincount_and_repeat_interleave_have_the_requested_sizes() {
    let x = leaf(&[10, 20, 30]);
    for (dim, expected) in [(0, [7, 20, 30]), (1, [10, 7, 30]), (-1, [10, 20, 7])] {
        assert_eq!(x.index_select(dim, &integers(&[7])).size(), expected);
    }
    assert_eq!(floats(&[]).index_select(0, &integers(&[1])).dim(), 0);

    let counts = integers(&[100]).bincount::<Tensor>(None, 8);
    assert_eq!((counts.size(), counts.kind()), (vec![8], Kind::Int64));
    let weighted = integers(&[100]).bincount(Some(floats(&[100])), 8);
    assert_eq!(weighted.size(), [8]);

    let repeated = Tensor::repeat_interleave(&integers(&[5]), 40);
    assert_eq!((repeated.size(), repeated.kind()), (vec![40], Kind::Int64));
    let error = Tensor::f_repeat_interleave(&integers(&[5]), None).unwrap_err();
    assert!(error.to_string().contains("needs output_size"), "{error}");
}

#[test]
fn fused_optimizers_run_and_allocate_nothing() {
    let _exclusive = exclusive();
    let [params, grads, first, second] = [(); 4].map(|()| vec![floats(&[64, 64]), floats(&[64])]);
    let steps = vec![floats(&[]), floats(&[])];
    let state = AdamWState {
        params: &params,
        grads: &grads,
        exp_avgs: &first,
        exp_avg_sqs: &second,
        steps: &steps,
    };
    let adamw = AdamW {
        lr: 1e-3,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
    };
    let sgd = Sgd {
        lr: 1e-3,
        momentum: 0.9,
        dampening: 0.0,
        weight_decay: 0.0,
        nesterov: true,
    };
    let scale = floats(&[]);
    let grown = growth(|| {
        let scalars = DeviceScalars {
            grad_scale: Some(&scale),
            found_inf: None,
        };
        kernel::fused_adamw(&state, &adamw, scalars).unwrap();
        kernel::fused_sgd(
            &params,
            &grads,
            &first,
            &sgd,
            true,
            DeviceScalars::default(),
        )
        .unwrap();
    });
    assert!(grown <= 64, "{grown} bytes");
}

#[test]
fn reading_a_scalar_returns_a_nonzero_value() {
    assert_eq!(floats(&[]).double_value(&[]), 1.0);
    assert_eq!(integers(&[3]).int64_value(&[2]), 1);
}

#[test]
fn convolutions_run_forward_and_backward_with_the_shapes_of_real_ones() {
    for (stride, padding, dilation, groups) in
        [(1, 1, 1, 1), (2, 0, 1, 1), (3, 2, 2, 1), (1, 1, 1, 2)]
    {
        let apply = |x: &Tensor, weight: &Tensor, bias: &Tensor| {
            let (stride, padding, dilation) = ([stride; 2], [padding; 2], [dilation; 2]);
            x.conv2d(weight, Some(bias), stride, padding, dilation, groups)
        };
        let shapes: [&[i64]; 3] = [&[2, 4, 28, 30], &[8, 4 / groups, 3, 5], &[8]];
        let [x, weight, bias] = shapes.map(leaf);
        let out = apply(&x, &weight, &bias);
        let [a, b, c] = shapes.map(|shape| wave(shape, 0.0));
        assert_eq!(out.size(), apply(&a, &b, &c).size());
        assert_gradients(&out, &[&x, &weight, &bias]);
    }
}

#[test]
fn relu_runs_forward_and_backward_and_in_place() {
    let _exclusive = exclusive();
    let x = leaf(&[4, 1024]);
    assert_gradients(&x.relu(), &[&x]);
    let grown = growth(|| {
        let _kept = tch::no_grad(|| x.relu());
    });
    assert_eq!(grown, 4096 * 4);
    let mut y = floats(&[4, 1024]);
    let grown = growth(|| {
        let _ = y.relu_();
    });
    assert_eq!(grown, 0);
}

#[test]
fn roll_returns_a_contiguous_copy() {
    let x = leaf(&[4, 6, 8]);
    let swapped = |x: &Tensor| x.transpose(0, 1).roll(4, -1);
    let real = swapped(&wave(&[4, 6, 8], 0.0));
    let out = swapped(&x);
    assert_eq!((out.size(), out.stride()), (real.size(), real.stride()));
    assert_gradients(&out, &[&x]);
}

#[test]
fn zeros_are_created_on_the_device_of_another_tensor() {
    let like = meta::empty(&[2], Kind::BFloat16).unwrap();
    let made = meta::new_zeros(&like, &[3, 4]).unwrap();
    assert!(meta::is_meta(&made));
    assert_eq!((made.size(), made.kind()), (vec![3, 4], Kind::BFloat16));
    let real = meta::new_zeros(&wave(&[2], 0.0), &[3]).unwrap();
    assert!(!meta::is_meta(&real));
    assert_eq!(values(&real), [0.0; 3]);
}

#[test]
fn unsupported_dtypes_are_rejected_by_name() {
    let error = meta::empty(&[1], Kind::ComplexFloat)
        .unwrap_err()
        .to_string();
    assert!(error.contains("ComplexFloat"), "{error}");
}

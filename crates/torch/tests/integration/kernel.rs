//! Operators that tch does not bind, compared with reference formulas.

use crate::numbers::{assert_close, values, wave};
use proptest::prelude::*;
use trainyard_torch::kernel::{self, AdamW, AdamWState, DeviceScalars, Sgd};
use trainyard_torch::{Device, Kind, Tensor};

/// Two tensors of different shapes.
fn pair(phase: f64) -> Vec<Tensor> {
    vec![wave(&[3, 5], phase), wave(&[4], phase + 1.0)]
}

fn zeros() -> Vec<Tensor> {
    pair(0.0).iter().map(Tensor::zeros_like).collect()
}

fn copies(tensors: &[Tensor]) -> Vec<Tensor> {
    tensors.iter().map(Tensor::copy).collect()
}

fn assert_all_close(found: &[Tensor], expected: &[Tensor]) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert_close(found, expected, 1e-12);
    }
}

// --- optimizers ---

/// The reference: AdamW on one element, as in its paper.
fn adamw_reference(options: &AdamW, start: f64, grads: &[f64]) -> f64 {
    let (mut x, mut m, mut v) = (start, 0.0, 0.0);
    for (step, grad) in (1..).zip(grads) {
        m = options.beta1 * m + (1.0 - options.beta1) * grad;
        v = options.beta2 * v + (1.0 - options.beta2) * grad * grad;
        let m_hat = m / (1.0 - options.beta1.powi(step));
        let v_hat = v / (1.0 - options.beta2.powi(step));
        x -= options.lr * (options.weight_decay * x + m_hat / (v_hat.sqrt() + options.eps));
    }
    x
}

/// The reference: SGD on one element, as in PyTorch.
fn sgd_reference(options: &Sgd, start: f64, grads: &[f64]) -> f64 {
    let (mut x, mut buffer) = (start, None);
    for grad in grads {
        let grad = grad + options.weight_decay * x;
        let direction = match buffer {
            None => grad,
            Some(b) => options.momentum * b + (1.0 - options.dampening) * grad,
        };
        buffer = Some(direction);
        x -= options.lr
            * match (options.momentum == 0.0, options.nesterov) {
                (true, _) => grad,
                (false, true) => grad + options.momentum * direction,
                (false, false) => direction,
            };
    }
    x
}

fn scalars(grad_scale: Option<&Tensor>) -> DeviceScalars<'_> {
    DeviceScalars {
        grad_scale,
        found_inf: None,
    }
}

proptest! {
    #[test]
    fn fused_adamw_equals_adamw(
        lr in 1e-4..0.1,
        beta1 in 0.0..0.99,
        beta2 in 0.5..0.999,
        weight_decay in 0.0..0.3,
        scale in prop::option::of(0.5..4.0),
        num_steps in 1usize..5,
    ) {
        let options = AdamW { lr, beta1, beta2, eps: 1e-8, weight_decay };
        let (params, exp_avgs, exp_avg_sqs) = (pair(0.0), zeros(), zeros());
        let steps = [(); 2].map(|()| Tensor::zeros([], (Kind::Float, Device::Cpu)));
        let grad_scale = scale.map(|scale| Tensor::from(scale as f32));
        for step in 0..num_steps {
            let grads = pair(step as f64 + 2.0);
            let state = AdamWState {
                params: &params,
                grads: &grads,
                exp_avgs: &exp_avgs,
                exp_avg_sqs: &exp_avg_sqs,
                steps: &steps,
            };
            kernel::fused_adamw(&state, &options, scalars(grad_scale.as_ref())).unwrap();
        }
        let divisor = scale.map_or(1.0, |scale| f64::from(scale as f32));
        for (which, param) in params.iter().enumerate() {
            let starts = values(&pair(0.0)[which]);
            for (index, found) in values(param).into_iter().enumerate() {
                let grads: Vec<f64> = (0..num_steps)
                    .map(|step| values(&pair(step as f64 + 2.0)[which])[index] / divisor)
                    .collect();
                let expected = adamw_reference(&options, starts[index], &grads);
                prop_assert!((found - expected).abs() < 1e-6, "{} is not {}", found, expected);
            }
        }
        prop_assert_eq!(values(&steps[1]), [num_steps as f64]);
    }

    #[test]
    fn fused_sgd_equals_sgd(
        lr in 1e-4..0.1,
        (momentum, dampening, nesterov) in prop_oneof![
            Just((0.0, 0.0, false)),
            (0.1..0.99, 0.0..0.5).prop_map(|(m, d)| (m, d, false)),
            (0.1..0.99).prop_map(|m| (m, 0.0, true)),
        ],
        weight_decay in 0.0..0.3,
        scale in prop::option::of(0.5..4.0),
        num_steps in 1usize..5,
    ) {
        let options = Sgd { lr, momentum, dampening, weight_decay, nesterov };
        let (params, buffers) = (pair(0.0), zeros());
        let momenta: &[Tensor] = if momentum == 0.0 { &[] } else { &buffers };
        let grad_scale = scale.map(|scale| Tensor::from(scale as f32));
        for step in 0..num_steps {
            let grads = pair(step as f64 + 2.0);
            kernel::fused_sgd(&params, &grads, momenta, &options, step == 0, scalars(grad_scale.as_ref()))
                .unwrap();
        }
        let divisor = scale.map_or(1.0, |scale| f64::from(scale as f32));
        for (which, param) in params.iter().enumerate() {
            let starts = values(&pair(0.0)[which]);
            for (index, found) in values(param).into_iter().enumerate() {
                let grads: Vec<f64> = (0..num_steps)
                    .map(|step| values(&pair(step as f64 + 2.0)[which])[index] / divisor)
                    .collect();
                let expected = sgd_reference(&options, starts[index], &grads);
                prop_assert!((found - expected).abs() < 1e-9, "{} is not {}", found, expected);
            }
        }
    }
}

// --- foreach operations ---

/// Applies `change` to every tensor separately.
fn each(tensors: &[Tensor], change: impl Fn(usize, &Tensor) -> Tensor) -> Vec<Tensor> {
    let numbered = tensors.iter().enumerate();
    numbered.map(|(index, t)| change(index, t)).collect()
}

#[test]
fn foreach_changes_every_tensor_in_place() {
    let (start, a, b) = (pair(0.0), pair(1.0), pair(2.0));
    // Away from zero, for divisions.
    let b = each(&b, |_, t| t + 3.0);
    let factor = Tensor::from(2.5f64);
    type Change<'a> = Box<dyn Fn(&[Tensor]) -> trainyard_torch::Result<()> + 'a>;
    let cases: Vec<(&str, Change<'_>, Vec<Tensor>)> = vec![
        (
            "mul",
            Box::new(|t| kernel::foreach_mul_(t, 1.5)),
            each(&start, |_, t| t * 1.5),
        ),
        (
            "mul by a tensor",
            Box::new(|t| kernel::foreach_mul_tensor_(t, &factor)),
            each(&start, |_, t| t * 2.5),
        ),
        (
            "mul by one each",
            Box::new(|t| kernel::foreach_mul_list_(t, &a)),
            each(&start, |i, t| t * &a[i]),
        ),
        (
            "add",
            Box::new(|t| kernel::foreach_add_(t, &a, -0.5)),
            each(&start, |i, t| t - &a[i] * 0.5),
        ),
        (
            "lerp",
            Box::new(|t| kernel::foreach_lerp_(t, &a, 0.25)),
            each(&start, |i, t| t * 0.75 + &a[i] * 0.25),
        ),
        (
            "addcmul",
            Box::new(|t| kernel::foreach_addcmul_(t, &a, &b, 0.1)),
            each(&start, |i, t| t + &a[i] * &b[i] * 0.1),
        ),
        (
            "addcdiv",
            Box::new(|t| kernel::foreach_addcdiv_(t, &a, &b, 0.1)),
            each(&start, |i, t| t + &a[i] / &b[i] * 0.1),
        ),
        (
            "copy",
            Box::new(|t| kernel::foreach_copy_(t, &a)),
            copies(&a),
        ),
        ("zero", Box::new(kernel::foreach_zero_), zeros()),
    ];
    for (name, change, expected) in cases {
        let tensors = copies(&start);
        change(&tensors).unwrap();
        println!("{name}");
        assert_all_close(&tensors, &expected);
    }
}

#[test]
fn foreach_creates_new_tensors() {
    let tensors = each(&pair(0.0), |_, t| t.square());
    let norms = kernel::foreach_norm(&tensors).unwrap();
    assert_all_close(
        &norms,
        &each(&tensors, |_, t| t.square().sum(Kind::Double).sqrt()),
    );
    let roots = kernel::foreach_sqrt(&tensors).unwrap();
    assert_all_close(&roots, &each(&pair(0.0), |_, t| t.abs()));
}

#[test]
fn lists_of_different_lengths_are_rejected() {
    let tensors = pair(0.0);
    assert!(kernel::foreach_add_(&tensors, &tensors[..1], 1.0).is_err());
    assert!(kernel::foreach_copy_(&tensors, &[]).is_err());
}

// --- norms and attention ---

#[test]
fn rms_norm_divides_by_the_root_of_the_mean_square() {
    let by_formula = |x: &Tensor, weight: &Tensor| {
        let mean = x.square().mean_dim(-1, true, Kind::Double);
        x * (mean + 1e-5).rsqrt() * weight
    };
    let by_kernel = |x: &Tensor, weight: &Tensor| kernel::rms_norm(x, weight, 1e-5).unwrap();
    assert_same_with_gradients(
        &[&[2, 3, 8], &[8]],
        |i| by_kernel(&i[0], &i[1]),
        |i| by_formula(&i[0], &i[1]),
    );
}

/// Asserts that two functions agree in their values and in all gradients.
fn assert_same_with_gradients(
    shapes: &[&[i64]],
    found: impl Fn(&[Tensor]) -> Tensor,
    expected: impl Fn(&[Tensor]) -> Tensor,
) {
    let inputs = || -> Vec<Tensor> {
        let phases = (0..).map(f64::from);
        let leaf = |(shape, phase): (&&[i64], f64)| wave(shape, phase).set_requires_grad(true);
        shapes.iter().zip(phases).map(leaf).collect()
    };
    let (a, b) = (inputs(), inputs());
    let (found, expected) = (found(&a), expected(&b));
    assert_close(&found, &expected, 1e-12);
    for out in [found, expected] {
        (wave(&out.size(), 0.5) * out).sum(Kind::Double).backward();
    }
    for (a, b) in a.iter().zip(&b) {
        assert_close(&a.grad(), &b.grad(), 1e-12);
    }
}

/// The reference: attention with explicit scores.
fn attention_reference(q: &Tensor, k: &Tensor, v: &Tensor, causal: bool) -> Tensor {
    let width = *q.size().last().unwrap() as f64;
    let mut scores = q.matmul(&k.transpose(-2, -1)) / width.sqrt();
    if causal {
        let (rows, columns) = (q.size()[2], k.size()[2]);
        let later = Tensor::ones([rows, columns], (Kind::Bool, Device::Cpu)).triu(1);
        scores = scores.masked_fill(&later, f64::NEG_INFINITY);
    }
    scores.softmax(-1, Kind::Double).matmul(v)
}

#[test]
fn attention_equals_the_formula() {
    let shape: &[i64] = &[2, 3, 7, 4];
    for causal in [false, true] {
        assert_same_with_gradients(
            &[shape; 3],
            |i| kernel::attention(&i[0], &i[1], &i[2], causal).unwrap(),
            |i| attention_reference(&i[0], &i[1], &i[2], causal),
        );
    }
}

#[test]
fn grouped_queries_attend_to_the_keys_of_their_group() {
    for (heads, key_heads) in [(4, 2), (6, 1), (4, 4)] {
        let repeat = |t: &Tensor| t.repeat_interleave_self_int(heads / key_heads, 1, None);
        assert_same_with_gradients(
            &[
                &[2, heads, 7, 4],
                &[2, key_heads, 7, 4],
                &[2, key_heads, 7, 4],
            ],
            |i| kernel::attention(&i[0], &i[1], &i[2], true).unwrap(),
            |i| attention_reference(&i[0], &repeat(&i[1]), &repeat(&i[2]), true),
        );
    }
}

#[test]
fn indivisible_numbers_of_heads_are_rejected() {
    let make = |heads| wave(&[1, heads, 4, 4], 0.0);
    let error = kernel::attention(&make(4), &make(3), &make(3), true).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("4 query heads cannot be grouped over 3"),
        "{error}"
    );
}

// --- determinism ---

/// One test for both states, because the setting is global to the process.
#[test]
fn nondeterministic_operators_fail_in_deterministic_mode() {
    let put = || {
        let (index, source) = (
            Tensor::from_slice(&[1i64, 1]),
            Tensor::from_slice(&[2.0, 3.0]),
        );
        Tensor::zeros([4], (Kind::Double, Device::Cpu)).f_put_(&index, &source, false)
    };
    assert!(put().is_ok());
    kernel::use_deterministic_algorithms(true).unwrap();
    let rejected = put().unwrap_err().to_string();
    kernel::use_deterministic_algorithms(false).unwrap();
    assert!(rejected.contains("deterministic"), "{rejected}");
    assert!(put().is_ok());
}

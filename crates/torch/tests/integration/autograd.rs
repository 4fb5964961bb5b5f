//! Gradient hooks, and custom functions whose backward is a Rust closure.

use std::sync::Arc;

use crate::numbers::{Notes, assert_close, leaf, take_notes, test_error, values, wave};
use trainyard_torch::autograd::{
    self, HookHandle, Saver, apply_multi_output, post_accumulate_hook, tensor_hook,
};
use trainyard_torch::{Kind, Result, Tensor};

/// The sum of all elements.
fn total(tensor: &Tensor) -> Tensor {
    tensor.sum(Kind::Double)
}

/// The error of backward.
fn backward_error(loss: &Tensor) -> String {
    loss.f_backward().expect_err("backward fails").to_string()
}

// --- leaf hooks ---

fn record_gradient(notes: &Notes<(char, Vec<f64>)>, name: char, leaf: &Tensor) -> HookHandle {
    let notes = Arc::clone(notes);
    post_accumulate_hook(leaf, move |leaf| {
        notes.lock().unwrap().push((name, values(&leaf.grad())));
        Ok(())
    })
    .unwrap()
}

#[test]
fn a_leaf_hook_sees_every_gradient_once_it_is_accumulated() {
    let (a, b) = (leaf(&[1.0, 2.0]), leaf(&[3.0]));
    let notes = Notes::default();
    let _hooks = [
        record_gradient(&notes, 'a', &a),
        record_gradient(&notes, 'b', &b),
    ];
    for factor in [1.0, 2.0] {
        // `a` is used twice: its hook runs when both gradients are accumulated.
        (total(&(&a * &a)) + total(&(&b * 5.0))).backward();
        let mut seen = take_notes(&notes);
        seen.sort_by_key(|(name, _)| *name);
        let expected = [
            ('a', vec![2.0 * factor, 4.0 * factor]),
            ('b', vec![5.0 * factor]),
        ];
        assert_eq!(seen, expected);
    }
}

#[test]
fn errors_and_panics_of_a_leaf_hook_reach_the_caller_of_backward() {
    let x = leaf(&[1.0]);
    let hook = post_accumulate_hook(&x, |_| Err(test_error("no more memory"))).unwrap();
    let message = backward_error(&total(&x));
    assert!(message.contains("no more memory"), "{message}");
    drop(hook);

    let hook = post_accumulate_hook(&x, |_| panic!("index {} of 3", 7)).unwrap();
    let message = backward_error(&total(&x));
    assert!(
        message.contains("a post-accumulate hook panicked: index 7 of 3"),
        "{message}"
    );
    // A hook that panicked can be called again.
    assert!(backward_error(&total(&x)).contains("index 7 of 3"));
    drop(hook);

    // The failures have no lasting effect.
    autograd::clear_grad(&x).unwrap();
    total(&x).backward();
    assert_eq!(values(&x.grad()), [1.0]);
}

#[test]
fn dropping_a_handle_removes_the_hook_and_drops_its_captures() {
    let x = leaf(&[1.0]);
    let notes = Notes::default();
    let hook = record_gradient(&notes, 'x', &x);
    total(&x).backward();
    assert_eq!(take_notes(&notes).len(), 1);
    drop(hook);
    assert_eq!(Arc::strong_count(&notes), 1);
    total(&x).backward();
    assert_eq!(take_notes(&notes), []);
}

#[test]
fn hooks_of_one_leaf_run_in_order_and_are_removed_one_by_one() {
    let x = leaf(&[1.0]);
    let notes = Notes::default();
    let (first, second) = (
        record_gradient(&notes, '1', &x),
        record_gradient(&notes, '2', &x),
    );
    let names = |notes| -> String {
        take_notes(notes)
            .into_iter()
            .map(|(name, _)| name)
            .collect()
    };
    total(&x).backward();
    assert_eq!(names(&notes), "12");
    drop(first);
    total(&x).backward();
    assert_eq!(names(&notes), "2");
    drop(second);
}

#[test]
fn a_leaf_hook_does_not_keep_its_leaf_alive() {
    let notes = Notes::default();
    let x = leaf(&[1.0]);
    let hook = record_gradient(&notes, 'x', &x);
    drop(x);
    drop(hook);
    assert_eq!(Arc::strong_count(&notes), 1);
}

#[test]
fn only_leaves_that_require_grad_can_have_a_leaf_hook() {
    let x = leaf(&[1.0]);
    for tensor in [&x * 2.0, x.detach()] {
        let error = post_accumulate_hook(&tensor, |_| Ok(())).err().unwrap();
        assert!(error.to_string().contains("leaf"), "{error}");
    }
}

#[test]
fn gradients_can_be_set_and_cleared() {
    let x = leaf(&[1.0, 2.0]);
    autograd::set_grad(&x, &Tensor::from_slice(&[5.0, 6.0])).unwrap();
    total(&x).backward();
    assert_eq!(values(&x.grad()), [6.0, 7.0]);
    autograd::clear_grad(&x).unwrap();
    assert!(!x.grad().defined());
}

// --- tensor hooks ---

#[test]
fn a_tensor_hook_sees_and_replaces_the_gradient() {
    let x = leaf(&[1.0, 2.0]);
    let y = &x * 3.0;
    let notes = Notes::default();
    let seen = Arc::clone(&notes);
    let _only_looks = tensor_hook(&y, move |grad| {
        seen.lock().unwrap().extend(values(grad));
        Ok(None)
    })
    .unwrap();
    let _replaces = tensor_hook(&y, |grad| Ok(Some(grad * 10.0))).unwrap();
    total(&(&y * &y)).backward();
    assert_eq!(take_notes(&notes), [6.0, 12.0]);
    assert_eq!(values(&x.grad()), [180.0, 360.0]);
}

#[test]
fn a_tensor_hook_on_a_leaf_changes_the_accumulated_gradient() {
    let x = leaf(&[1.0]);
    let hook = tensor_hook(&x, |grad| Ok(Some(-grad))).unwrap();
    total(&(&x * 4.0)).backward();
    drop(hook);
    total(&(&x * 4.0)).backward();
    assert_eq!(values(&x.grad()), [0.0]);
}

#[test]
fn errors_and_panics_of_a_tensor_hook_reach_the_caller_of_backward() {
    let x = leaf(&[1.0]);
    let y = &x * 2.0;
    let hook = tensor_hook(&y, |_| Err(test_error("rejected"))).unwrap();
    assert!(backward_error(&total(&y)).contains("rejected"));
    drop(hook);
    let y = &x * 2.0;
    let _hook = tensor_hook(&y, |_| panic!("broken")).unwrap();
    assert!(backward_error(&total(&y)).contains("a tensor hook panicked: broken"));
}

#[test]
fn a_removed_tensor_hook_is_gone_even_if_the_graph_outlives_the_tensor() {
    let x = leaf(&[1.0]);
    let notes: Notes<f64> = Notes::default();
    let seen = Arc::clone(&notes);
    let (loss, hook) = {
        let y = &x * 2.0;
        let hook = tensor_hook(&y, move |grad| {
            seen.lock().unwrap().extend(values(grad));
            Ok(Some(grad * 100.0))
        })
        .unwrap();
        (total(&y), hook)
    };
    drop(hook);
    assert_eq!(Arc::strong_count(&notes), 1);
    loss.backward();
    assert_eq!(values(&x.grad()), [2.0]);
}

// --- custom functions ---

/// `a * b`, saving both inputs.
fn product(a: &Tensor, b: &Tensor) -> Tensor {
    let forward = |saver: &mut Saver, inputs: &[&Tensor]| {
        inputs.iter().for_each(|input| saver.save(input));
        Ok(vec![inputs[0] * inputs[1]])
    };
    let backward = |saved: &[Tensor], grads: &[Option<Tensor>]| {
        let grad = grads[0].as_ref().unwrap();
        Ok(vec![Some(grad * &saved[1]), Some(grad * &saved[0])])
    };
    apply_multi_output(&[a, b], forward, backward)
        .unwrap()
        .remove(0)
}

/// `exp(x)`, saving the output.
fn exponential(x: &Tensor) -> Tensor {
    let forward = |saver: &mut Saver, inputs: &[&Tensor]| {
        let output = inputs[0].exp();
        saver.save(&output);
        Ok(vec![output])
    };
    let backward = |saved: &[Tensor], grads: &[Option<Tensor>]| {
        Ok(vec![grads[0].as_ref().map(|grad| grad * &saved[0])])
    };
    apply_multi_output(&[x], forward, backward)
        .unwrap()
        .remove(0)
}

/// An identity function with the given `backward`.
fn identity(
    x: &Tensor,
    backward: impl FnMut(&[Tensor], &[Option<Tensor>]) -> Result<Vec<Option<Tensor>>> + Send + 'static,
) -> Tensor {
    apply_multi_output(&[x], |_, inputs| Ok(vec![inputs[0].copy()]), backward)
        .unwrap()
        .remove(0)
}

/// The gradient of `f` at `x` by central differences.
fn numeric_gradient(f: &dyn Fn(&Tensor) -> Tensor, x: &Tensor) -> Vec<f64> {
    let step = 1e-6;
    let at = |index: usize, shift: f64| {
        let mut moved = values(x);
        moved[index] += shift;
        values(&f(&Tensor::from_slice(&moved).view_as(x)))[0]
    };
    let slope = |index| (at(index, step) - at(index, -step)) / (2.0 * step);
    (0..x.numel()).map(slope).collect()
}

#[test]
fn gradients_of_functions_agree_with_finite_differences() {
    type Function = Box<dyn Fn(&Tensor) -> Tensor>;
    let weight = wave(&[3, 2], 0.3);
    let cases: [(&str, Function); 4] = [
        ("product", Box::new(move |x| total(&product(x, &weight)))),
        ("the same input twice", Box::new(|x| total(&product(x, x)))),
        (
            "exponential",
            Box::new(|x| total(&(exponential(x) * wave(&[3, 2], 1.0)))),
        ),
        (
            "one inside another",
            Box::new(|x| total(&exponential(&product(&x.sin(), x)))),
        ),
    ];
    for (name, f) in &cases {
        let x = wave(&[3, 2], 0.0).set_requires_grad(true);
        f(&x).backward();
        let expected = Tensor::from_slice(&numeric_gradient(f, &x)).view_as(&x);
        println!("{name}");
        assert_close(&x.grad(), &expected, 1e-8);
    }
}

#[test]
fn unused_outputs_have_no_gradient() {
    let (a, b) = (leaf(&[2.0]), leaf(&[3.0]));
    let notes = Notes::default();
    let seen = Arc::clone(&notes);
    let outputs = apply_multi_output(
        &[&a, &b],
        |_, inputs| Ok(vec![inputs[0] * 2.0, inputs[1] * 3.0]),
        move |_, grads| {
            seen.lock()
                .unwrap()
                .extend(grads.iter().map(Option::is_some));
            Ok(vec![None, grads[1].as_ref().map(|grad| grad * 3.0)])
        },
    )
    .unwrap();
    total(&outputs[1]).backward();
    assert_eq!(take_notes(&notes), [false, true]);
    assert_eq!(values(&b.grad()), [3.0]);
    assert!(!a.grad().defined(), "no gradient was given for it");
}

#[test]
fn an_input_may_be_returned_as_an_output() {
    let x = leaf(&[1.0, 2.0]);
    let y = &x * 1.0;
    let forward = |_: &mut Saver, inputs: &[&Tensor]| Ok(vec![inputs[0].shallow_clone()]);
    let twice =
        |_: &[Tensor], grads: &[Option<Tensor>]| Ok(vec![grads[0].as_ref().map(|grad| grad * 2.0)]);
    let out = apply_multi_output(&[&y], forward, twice).unwrap().remove(0);
    total(&out).backward();
    assert_eq!(values(&x.grad()), [2.0, 2.0]);
}

#[test]
fn in_place_changes_of_saved_tensors_are_detected() {
    let (a, b) = (leaf(&[1.0]), leaf(&[2.0]));
    let changed = "modified by an inplace operation";

    let mut input = &a * 1.0;
    let out = product(&input, &b);
    let _ = input.g_add_scalar_(1.0);
    let message = backward_error(&total(&out));
    assert!(message.contains(changed), "{message}");

    let out = exponential(&a);
    let loss = total(&out);
    tch::no_grad(|| {
        let _ = out.detach().g_add_scalar_(1.0);
    });
    let message = backward_error(&loss);
    assert!(message.contains(changed), "{message}");
}

#[test]
fn a_released_graph_drops_the_closure() {
    let x = leaf(&[1.0]);
    let counter = Arc::new(());
    let counting = || {
        let captured = Arc::clone(&counter);
        identity(&x, move |_, grads| {
            let _ = &captured;
            Ok(vec![grads[0].as_ref().map(Tensor::copy)])
        })
    };
    // Backward without a retained graph drops the closure, even if the output is alive.
    let out = counting();
    assert_eq!(Arc::strong_count(&counter), 2);
    total(&out).backward();
    assert_eq!(Arc::strong_count(&counter), 1);
    // Dropping the output drops the closure.
    drop(counting());
    assert_eq!(Arc::strong_count(&counter), 1);
}

#[test]
fn a_second_backward_needs_a_retained_graph() {
    let x = leaf(&[3.0]);
    let loss = total(&product(&x, &x));
    let gradient = |keep| Tensor::f_run_backward(&[&loss], &[&x], keep, false);
    for keep in [true, false] {
        assert_eq!(values(&gradient(keep).unwrap()[0]), [6.0]);
    }
    let message = gradient(false).unwrap_err().to_string();
    assert!(
        message.contains("already freed") || message.contains("second time"),
        "{message}"
    );
}

#[test]
fn without_autograd_only_forward_runs() {
    let x = leaf(&[2.0]);
    let counter = Arc::new(());
    let apply = |x: &Tensor| {
        let captured = Arc::clone(&counter);
        identity(x, move |_, _| {
            let _ = &captured;
            Ok(vec![None])
        })
    };
    for out in [tch::no_grad(|| apply(&x)), apply(&x.detach())] {
        assert!(!out.requires_grad());
        assert_eq!(values(&out), [2.0]);
    }
    assert_eq!(Arc::strong_count(&counter), 1);
}

#[test]
fn errors_and_panics_of_a_function_reach_the_caller() {
    let x = leaf(&[1.0, 2.0]);
    let forward = apply_multi_output(
        &[&x],
        |_, _| Err(test_error("forward")),
        |_, _| Ok(vec![None]),
    );
    assert!(forward.err().unwrap().to_string().contains("forward"));

    let fails = identity(&x, |_, _| Err(test_error("custom failure")));
    assert!(backward_error(&total(&fails)).contains("custom failure"));
    let panics = identity(&x, |_, _| panic!("out of bounds"));
    assert!(
        backward_error(&total(&panics))
            .contains("the backward of a custom function panicked: out of bounds")
    );
    let miscounts = identity(&x, |_, _| Ok(Vec::new()));
    assert!(backward_error(&total(&miscounts)).contains("0 gradients for 1 inputs"));
    let misshapes = identity(&x, |_, _| {
        Ok(vec![Some(Tensor::from_slice(&[1.0, 2.0, 3.0]))])
    });
    assert!(backward_error(&total(&misshapes)).contains("shape"));
    assert!(!x.grad().defined());
}

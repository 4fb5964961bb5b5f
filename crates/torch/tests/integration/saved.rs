//! Saved-tensor hooks.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

use crate::numbers::{assert_close, test_error, values, wave};
use trainyard_torch::autograd::apply_multi_output;
use trainyard_torch::saved::{SavedTensorHooks, with_hooks};
use trainyard_torch::{Kind, Result, Tensor};

/// Hooks that store tensors in memory and count calls.
#[derive(Clone, Default)]
struct MemoryHooks(Arc<Mutex<HookState>>);

#[derive(Default)]
struct HookState {
    kept: HashMap<u64, Tensor>,
    num_packed: u64,
    num_unpacked: u64,
    num_released: u64,
}

impl SavedTensorHooks for MemoryHooks {
    fn pack(&self, tensor: Tensor) -> Result<u64> {
        let mut state = self.0.lock().unwrap();
        let id = state.num_packed;
        state.num_packed += 1;
        // A copy, so that backward provably uses the unpacked tensor.
        state.kept.insert(id, tensor.copy());
        Ok(id)
    }

    fn unpack(&self, id: u64) -> Result<Tensor> {
        let mut state = self.0.lock().unwrap();
        state.num_unpacked += 1;
        let kept = state.kept.get(&id);
        kept.map(Tensor::shallow_clone)
            .ok_or_else(|| test_error("no tensor has this id"))
    }

    fn release(&self, id: u64) {
        let mut state = self.0.lock().unwrap();
        assert!(
            state.kept.remove(&id).is_some(),
            "a tensor was released twice"
        );
        state.num_released += 1;
    }
}

impl MemoryHooks {
    fn counts(&self) -> (u64, u64, u64) {
        let state = self.0.lock().unwrap();
        (state.num_packed, state.num_unpacked, state.num_released)
    }

    fn is_empty(&self) -> bool {
        self.0.lock().unwrap().kept.is_empty()
    }
}

/// A leaf, for a loss that saves several tensors.
fn leaf() -> Tensor {
    wave(&[4, 4], 0.2).set_requires_grad(true)
}

fn loss(x: &Tensor) -> Tensor {
    let y = (x * x).tanh();
    y.matmul(x).exp().sum(Kind::Double)
}

#[test]
fn packed_tensors_are_unpacked_and_released_and_gradients_are_the_same() {
    let (plain, kept) = (leaf(), leaf());
    loss(&plain).backward();

    let hooks = MemoryHooks::default();
    let out = with_hooks(hooks.clone(), || loss(&kept)).unwrap();
    let (packed, unpacked, released) = hooks.counts();
    assert!(packed >= 5, "mul saves 2, tanh 1, matmul 2, exp 1");
    assert_eq!((unpacked, released), (0, 0));
    out.backward();
    drop(out);
    assert_eq!(hooks.counts(), (packed, packed, packed));
    assert!(hooks.is_empty());
    assert_eq!(values(&kept.grad()), values(&plain.grad()));
}

#[test]
fn dropping_the_graph_releases_packed_tensors() {
    let (x, hooks) = (leaf(), MemoryHooks::default());
    drop(with_hooks(hooks.clone(), || loss(&x)).unwrap());
    let (packed, unpacked, released) = hooks.counts();
    assert_eq!((unpacked, released), (0, packed));
    assert_eq!(
        Arc::strong_count(&hooks.0),
        1,
        "the hooks are dropped with the graph"
    );
}

#[test]
fn hooks_apply_to_tensors_saved_by_custom_functions() {
    let (x, hooks) = (leaf(), MemoryHooks::default());
    let square = with_hooks(hooks.clone(), || {
        apply_multi_output(
            &[&x],
            |saver, inputs| {
                let out = inputs[0] * inputs[0];
                saver.save(inputs[0]);
                saver.save(&out);
                Ok(vec![out])
            },
            |saved, grads| {
                assert_close(&(&saved[0] * &saved[0]), &saved[1], 1e-15);
                Ok(vec![grads[0].as_ref().map(|grad| grad * &saved[0] * 2.0)])
            },
        )
        .unwrap()
        .remove(0)
    })
    .unwrap();
    assert_eq!(hooks.counts(), (2, 0, 0));
    square.sum(Kind::Double).backward();
    drop(square);
    assert_eq!(hooks.counts(), (2, 2, 2));
    assert_close(&x.grad(), &(x.detach() * 2.0), 1e-15);
}

#[test]
fn only_the_innermost_hooks_pack() {
    let x = leaf();
    let (outer, inner) = (MemoryHooks::default(), MemoryHooks::default());
    with_hooks(outer.clone(), || {
        let _ = x.exp();
        let _ = with_hooks(inner.clone(), || x.exp()).unwrap();
        let _ = x.exp();
    })
    .unwrap();
    let _ = x.exp();
    assert_eq!((outer.counts().0, inner.counts().0), (2, 1));
}

#[test]
fn a_panic_in_the_body_removes_the_hooks() {
    let (x, hooks) = (leaf(), MemoryHooks::default());
    let body = || with_hooks(hooks.clone(), || panic!("stop"));
    assert!(catch_unwind(AssertUnwindSafe(body)).is_err());
    let _ = x.exp();
    assert_eq!(hooks.counts(), (0, 0, 0));
}

/// Hooks that fail as configured.
struct FailingHooks {
    packs: bool,
    panics: bool,
    released: Arc<Mutex<u64>>,
}

impl FailingHooks {
    fn fail<T>(&self) -> Result<T> {
        if self.panics {
            panic!("the hook panicked")
        } else {
            Err(test_error("storage is unavailable"))
        }
    }
}

impl SavedTensorHooks for FailingHooks {
    fn pack(&self, _: Tensor) -> Result<u64> {
        if self.packs { Ok(7) } else { self.fail() }
    }

    fn unpack(&self, _: u64) -> Result<Tensor> {
        self.fail()
    }

    fn release(&self, id: u64) {
        assert_eq!(id, 7);
        *self.released.lock().unwrap() += 1;
    }
}

fn failing_hooks(packs: bool, panics: bool) -> (FailingHooks, Arc<Mutex<u64>>) {
    let released = Arc::new(Mutex::new(0));
    let hooks = FailingHooks {
        packs,
        panics,
        released: Arc::clone(&released),
    };
    (hooks, released)
}

#[test]
fn pack_failures_are_errors_of_forward_without_a_release() {
    for (panics, expected) in [
        (false, "storage is unavailable"),
        (true, "a pack hook panicked"),
    ] {
        let (hooks, released) = failing_hooks(false, panics);
        let out = with_hooks(hooks, || leaf().f_exp()).unwrap();
        let message = out.unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
        assert_eq!(*released.lock().unwrap(), 0);
    }
}

#[test]
fn unpack_failures_are_errors_of_backward() {
    for (panics, expected) in [
        (false, "storage is unavailable"),
        (true, "an unpack hook panicked"),
    ] {
        let (hooks, released) = failing_hooks(true, panics);
        let x = leaf();
        let out = with_hooks(hooks, || x.exp().sum(Kind::Double)).unwrap();
        let message = out.f_backward().unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
        drop(out);
        assert_eq!(*released.lock().unwrap(), 1);
    }
}

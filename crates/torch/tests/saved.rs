//! What becomes of the tensors that autograd saves.

mod numbers;

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

use numbers::{assert_close, trouble, values, wave};
use trainyard_torch::autograd::function;
use trainyard_torch::saved::{Keeper, saving_with};
use trainyard_torch::{Kind, Result, Tensor};

/// Keeps tensors in a cupboard and counts who comes.
#[derive(Clone, Default)]
struct Cupboard(Arc<Mutex<Shelves>>);

#[derive(Default)]
struct Shelves {
    kept: HashMap<u64, Tensor>,
    num_packed: u64,
    num_unpacked: u64,
    num_forgotten: u64,
}

impl Keeper for Cupboard {
    fn pack(&self, tensor: Tensor) -> Result<u64> {
        let mut shelves = self.0.lock().unwrap();
        let ticket = shelves.num_packed;
        shelves.num_packed += 1;
        // A copy: what backward sees is really what was brought back.
        shelves.kept.insert(ticket, tensor.copy());
        Ok(ticket)
    }

    fn unpack(&self, ticket: u64) -> Result<Tensor> {
        let mut shelves = self.0.lock().unwrap();
        shelves.num_unpacked += 1;
        let kept = shelves.kept.get(&ticket);
        kept.map(Tensor::shallow_clone)
            .ok_or_else(|| trouble("nothing under this ticket"))
    }

    fn forget(&self, ticket: u64) {
        let mut shelves = self.0.lock().unwrap();
        assert!(shelves.kept.remove(&ticket).is_some(), "forgotten twice");
        shelves.num_forgotten += 1;
    }
}

impl Cupboard {
    fn counts(&self) -> (u64, u64, u64) {
        let shelves = self.0.lock().unwrap();
        (
            shelves.num_packed,
            shelves.num_unpacked,
            shelves.num_forgotten,
        )
    }

    fn is_empty(&self) -> bool {
        self.0.lock().unwrap().kept.is_empty()
    }
}

/// A leaf, and a loss that saves several things of it.
fn leaf() -> Tensor {
    wave(&[4, 4], 0.2).set_requires_grad(true)
}

fn loss(x: &Tensor) -> Tensor {
    let y = (x * x).tanh();
    y.matmul(x).exp().sum(Kind::Double)
}

#[test]
fn everything_packed_is_unpacked_and_forgotten_and_gradients_are_the_same() {
    let (plain, kept) = (leaf(), leaf());
    loss(&plain).backward();

    let cupboard = Cupboard::default();
    let out = saving_with(cupboard.clone(), || loss(&kept)).unwrap();
    let (packed, unpacked, forgotten) = cupboard.counts();
    assert!(
        packed >= 5,
        "two of mul, one of tanh, two of matmul, one of exp"
    );
    assert_eq!((unpacked, forgotten), (0, 0));
    out.backward();
    drop(out);
    assert_eq!(cupboard.counts(), (packed, packed, packed));
    assert!(cupboard.is_empty());
    assert_eq!(values(&kept.grad()), values(&plain.grad()));
}

#[test]
fn a_graph_that_is_only_dropped_forgets_too() {
    let (x, cupboard) = (leaf(), Cupboard::default());
    drop(saving_with(cupboard.clone(), || loss(&x)).unwrap());
    let (packed, unpacked, forgotten) = cupboard.counts();
    assert_eq!((unpacked, forgotten), (0, packed));
    assert_eq!(
        Arc::strong_count(&cupboard.0),
        1,
        "the keeper is gone with the graph"
    );
}

#[test]
fn what_functions_save_goes_to_the_keeper_too() {
    let (x, cupboard) = (leaf(), Cupboard::default());
    let square = saving_with(cupboard.clone(), || {
        function(
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
    assert_eq!(cupboard.counts(), (2, 0, 0));
    square.sum(Kind::Double).backward();
    drop(square);
    assert_eq!(cupboard.counts(), (2, 2, 2));
    assert_close(&x.grad(), &(x.detach() * 2.0), 1e-15);
}

#[test]
fn the_innermost_keeper_packs_and_none_outside() {
    let x = leaf();
    let (outer, inner) = (Cupboard::default(), Cupboard::default());
    saving_with(outer.clone(), || {
        let _ = x.exp();
        let _ = saving_with(inner.clone(), || x.exp()).unwrap();
        let _ = x.exp();
    })
    .unwrap();
    let _ = x.exp();
    assert_eq!((outer.counts().0, inner.counts().0), (2, 1));
}

#[test]
fn a_panic_in_the_body_ends_the_keeping() {
    let (x, cupboard) = (leaf(), Cupboard::default());
    let body = || saving_with(cupboard.clone(), || panic!("stop"));
    assert!(catch_unwind(AssertUnwindSafe(body)).is_err());
    let _ = x.exp();
    assert_eq!(cupboard.counts(), (0, 0, 0));
}

/// Fails as it is told to.
struct Broken {
    packs: bool,
    panics: bool,
    forgotten: Arc<Mutex<u64>>,
}

impl Broken {
    fn fail<T>(&self) -> Result<T> {
        match self.panics {
            true => panic!("the cupboard fell over"),
            false => Err(trouble("the cupboard is locked")),
        }
    }
}

impl Keeper for Broken {
    fn pack(&self, _: Tensor) -> Result<u64> {
        if self.packs { Ok(7) } else { self.fail() }
    }

    fn unpack(&self, _: u64) -> Result<Tensor> {
        self.fail()
    }

    fn forget(&self, ticket: u64) {
        assert_eq!(ticket, 7);
        *self.forgotten.lock().unwrap() += 1;
    }
}

fn broken(packs: bool, panics: bool) -> (Broken, Arc<Mutex<u64>>) {
    let forgotten = Arc::new(Mutex::new(0));
    let keeper = Broken {
        packs,
        panics,
        forgotten: Arc::clone(&forgotten),
    };
    (keeper, forgotten)
}

#[test]
fn failures_to_pack_are_errors_of_forward_and_there_is_nothing_to_forget() {
    for (panics, words) in [
        (false, "the cupboard is locked"),
        (true, "a pack hook panicked"),
    ] {
        let (keeper, forgotten) = broken(false, panics);
        let out = saving_with(keeper, || leaf().f_exp()).unwrap();
        let message = out.unwrap_err().to_string();
        assert!(message.contains(words), "{message}");
        assert_eq!(*forgotten.lock().unwrap(), 0);
    }
}

#[test]
fn failures_to_unpack_are_errors_of_backward() {
    for (panics, words) in [
        (false, "the cupboard is locked"),
        (true, "an unpack hook panicked"),
    ] {
        let (keeper, forgotten) = broken(true, panics);
        let x = leaf();
        let out = saving_with(keeper, || x.exp().sum(Kind::Double)).unwrap();
        let message = out.f_backward().unwrap_err().to_string();
        assert!(message.contains(words), "{message}");
        drop(out);
        assert_eq!(*forgotten.lock().unwrap(), 1);
    }
}

//! Releasing and restoring the memory of tensors.

use crate::numbers::{exclusive, leaf, values};
use trainyard_torch::autograd::without_version_bump;
use trainyard_torch::{Kind, Tensor, memory, meta, storage};

/// Bytes allocated by all tensors now.
fn allocated() -> i64 {
    memory::report().unwrap().total as i64
}

#[test]
fn memory_is_released_and_restored() {
    let _exclusive = exclusive();
    memory::observe();
    for on_meta in [false, true] {
        let tensor = if on_meta {
            meta::empty(&[1000], Kind::Double).unwrap()
        } else {
            Tensor::zeros([1000], (Kind::Double, tch::Device::Cpu))
        };
        let view = tensor.narrow(0, 10, 20);
        let full = allocated();
        storage::release(&tensor).unwrap();
        assert_eq!(allocated(), full - 8000, "meta: {on_meta}");
        assert_eq!((tensor.size(), view.size()), (vec![1000], vec![20]));
        assert_eq!(
            storage::bytes(&tensor).unwrap(),
            8000,
            "the storage keeps its size"
        );
        storage::restore(&tensor).unwrap();
        assert_eq!(allocated(), full);
        assert!(storage::is_shared(&tensor, &view).unwrap());
    }
}

#[test]
fn a_restored_tensor_and_its_views_can_be_written() {
    let _exclusive = exclusive();
    let mut tensor = Tensor::from_slice(&[1.0, 2.0, 3.0]);
    let view = tensor.narrow(0, 1, 2);
    storage::release(&tensor).unwrap();
    storage::restore(&tensor).unwrap();
    tensor.copy_(&Tensor::from_slice(&[4.0, 5.0, 6.0]));
    assert_eq!(values(&view), [5.0, 6.0]);
}

#[test]
fn releasing_twice_has_the_effect_of_releasing_once() {
    let _exclusive = exclusive();
    memory::observe();
    let tensor = Tensor::zeros([1000], (Kind::Double, tch::Device::Cpu));
    let full = allocated();
    storage::release(&tensor).unwrap();
    storage::release(&tensor).unwrap();
    assert_eq!(allocated(), full - 8000);
    storage::restore(&tensor).unwrap();
    storage::restore(&tensor).unwrap();
    assert_eq!(allocated(), full);
}

#[test]
fn a_rebound_leaf_uses_the_new_memory_and_keeps_its_autograd_state() {
    let _exclusive = exclusive();
    let x = leaf(&[1.0, 2.0]);
    let mut flat = Tensor::from_slice(&[0.0, 7.0, 8.0, 0.0]);
    storage::rebind(&x, &flat.narrow(0, 1, 2)).unwrap();
    assert_eq!(values(&x), [7.0, 8.0]);
    assert!(storage::is_shared(&x, &flat).unwrap());
    let _ = flat.g_mul_scalar_(10.0);
    assert!(x.is_leaf() && x.requires_grad());
    (&x * &x).sum(Kind::Double).backward();
    assert_eq!(values(&x.grad()), [140.0, 160.0]);
}

#[test]
fn rebinding_changes_shape_and_strides_too() {
    let _exclusive = exclusive();
    let x = leaf(&[1.0]);
    let matrix = Tensor::from_slice(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).view([2, 3]);
    storage::rebind(&x, &matrix.tr()).unwrap();
    assert_eq!(x.size(), [3, 2]);
    assert_eq!(values(&x), [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
    assert!(!storage::is_shared(&x, &leaf(&[1.0])).unwrap());
}

/// A product that saved `weight`, whose memory was then released, restored and refilled.
fn regathered(weight: &Tensor, refill: impl FnOnce(&Tensor)) -> (Tensor, Tensor) {
    let x = leaf(&[2.0, 3.0]);
    let loss = (&x * weight).sum(Kind::Double);
    storage::release(weight).unwrap();
    storage::restore(weight).unwrap();
    refill(weight);
    (x, loss)
}

#[test]
fn gathering_a_saved_parameter_again_needs_without_version_bump() {
    let _exclusive = exclusive();
    let fill = |weight: &Tensor| {
        tch::no_grad(|| {
            weight
                .shallow_clone()
                .copy_(&Tensor::from_slice(&[5.0, 6.0]))
        })
    };

    let weight = leaf(&[5.0, 6.0]);
    let (_, loss) = regathered(&weight, fill);
    let message = loss.f_backward().unwrap_err().to_string();
    assert!(
        message.contains("modified by an inplace operation"),
        "{message}"
    );

    let weight = leaf(&[5.0, 6.0]);
    let (x, loss) = regathered(&weight, |weight| {
        without_version_bump(weight, || fill(weight)).unwrap()
    });
    loss.backward();
    assert_eq!(values(&x.grad()), [5.0, 6.0]);
    assert_eq!(values(&weight.grad()), [2.0, 3.0]);
}

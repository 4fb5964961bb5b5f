//! Helpers: small tensors from numbers, and numbers from tensors.
#![allow(dead_code)]

use std::sync::{Arc, Mutex, MutexGuard};

use trainyard_torch::{Device, Kind, Tensor, TorchError};

/// A vector of doubles that requires grad.
pub fn leaf(values: &[f64]) -> Tensor {
    Tensor::from_slice(values).set_requires_grad(true)
}

/// Deterministic doubles between -1 and 1 of any shape, different for every phase.
pub fn wave(shape: &[i64], phase: f64) -> Tensor {
    let count: i64 = shape.iter().product();
    let ramp = Tensor::arange(count, (Kind::Double, Device::Cpu));
    (ramp * 0.7 + phase).sin().view(shape)
}

/// All elements, in order.
pub fn values(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor.detach().to_kind(Kind::Double).reshape(-1i64)).unwrap()
}

/// Asserts that two tensors have the same shape and nearly the same elements.
pub fn assert_close(found: &Tensor, expected: &Tensor, tolerance: f64) {
    assert_eq!(found.size(), expected.size());
    let pairs = values(found).into_iter().zip(values(expected));
    for (index, (found, expected)) in pairs.enumerate() {
        let difference = (found - expected).abs();
        assert!(
            difference <= tolerance * expected.abs().max(1.0),
            "element {index} is {found}, expected {expected}"
        );
    }
}

/// An error as a caller of this crate would return.
pub fn test_error(message: &str) -> TorchError {
    TorchError::Other(message.to_owned())
}

/// Values that callbacks append and the test reads.
pub type Notes<T> = Arc<Mutex<Vec<T>>>;

/// Takes the values recorded so far.
pub fn take_notes<T>(notes: &Notes<T>) -> Vec<T> {
    std::mem::take(&mut *notes.lock().unwrap())
}

/// Serializes tests that use global state of the process.
pub fn exclusive() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

//! Small tensors from numbers, and numbers from tensors.
// Every test program has its own copy and uses a part of it.
#![allow(dead_code)]

use std::sync::{Arc, Mutex, MutexGuard};

use trainyard_torch::{Device, Kind, Tensor, TorchError};

/// A vector of doubles that wants a gradient.
pub fn leaf(values: &[f64]) -> Tensor {
    Tensor::from_slice(values).set_requires_grad(true)
}

/// Doubles of any shape between -1 and 1, the same every time, different for every phase.
pub fn wave(shape: &[i64], phase: f64) -> Tensor {
    let count: i64 = shape.iter().product();
    let ramp = Tensor::arange(count, (Kind::Double, Device::Cpu));
    (ramp * 0.7 + phase).sin().view(shape)
}

/// All elements, in order.
pub fn values(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor.detach().to_kind(Kind::Double).reshape(-1i64)).unwrap()
}

/// Asserts that two tensors have one shape and nearly the same elements.
pub fn assert_close(found: &Tensor, expected: &Tensor, tolerance: f64) {
    assert_eq!(found.size(), expected.size());
    let pairs = values(found).into_iter().zip(values(expected));
    for (index, (found, expected)) in pairs.enumerate() {
        let difference = (found - expected).abs();
        assert!(
            difference <= tolerance * expected.abs().max(1.0),
            "element {index}: {found} instead of {expected}"
        );
    }
}

/// An error a caller of ours would raise.
pub fn trouble(message: &str) -> TorchError {
    TorchError::Other(message.to_owned())
}

/// Something that callbacks write and the test reads.
pub type Notes<T> = Arc<Mutex<Vec<T>>>;

/// What was noted so far, and from now on nothing.
pub fn taken<T>(notes: &Notes<T>) -> Vec<T> {
    std::mem::take(&mut *notes.lock().unwrap())
}

/// Lets one test of a program at a time use what the whole process shares.
pub fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

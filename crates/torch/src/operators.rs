//! Every operator libtorch runs, with the shapes of its tensors. Operators that call others appear
//! after and around them; only those that compute count floating-point operations.

use trainyard_trace::{Operator, flops};

use crate::bridge::ffi;
use crate::error::Result;

/// Observes as long as it lives; nothing unread is left when it ends.
struct Observing;

impl Observing {
    fn begin() -> Result<Observing> {
        ffi::observe_operators(true)?;
        Ok(Observing)
    }

    fn end(self) -> Result<Vec<ffi::OperatorRecord>> {
        ffi::observe_operators(false)?;
        Ok(ffi::take_operators())
    }
}

impl Drop for Observing {
    fn drop(&mut self) {
        // Only a panic leaves something to stop, and then nobody reads.
        let _ = ffi::observe_operators(false);
        drop(ffi::take_operators());
    }
}

/// Runs `body` and returns every operator that ran meanwhile, on any thread, in order of ending.
/// One record at a time.
pub fn record<T>(body: impl FnOnce() -> T) -> Result<(T, Vec<Operator>)> {
    let observing = Observing::begin()?;
    let out = body();
    let operators = observing
        .end()?
        .into_iter()
        .map(|r| {
            let shapes = shapes(&r.shapes);
            Operator {
                flops: flops(&r.name, &shapes),
                name: r.name,
                shapes,
                started_ns: r.started_ns,
                ended_ns: r.ended_ns,
                thread: r.thread,
            }
        })
        .collect();
    Ok((out, operators))
}

/// Reads `[num_dims, dims..., num_dims, dims...]`.
fn shapes(flat: &[i64]) -> Vec<Vec<i64>> {
    let mut out = Vec::new();
    let mut rest = flat;
    while let Some((&num_dims, tail)) = rest.split_first() {
        let (dims, next) = tail.split_at((num_dims as usize).min(tail.len()));
        out.push(dims.to_vec());
        rest = next;
    }
    out
}

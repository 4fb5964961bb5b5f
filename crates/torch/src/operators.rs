//! Records every operator that libtorch runs, with its input shapes. An operator that calls others is recorded
//! after them and its interval contains theirs; only operators that compute count floating-point operations.

use trainyard_trace::{Operator, flops};

use crate::bridge::ffi;
use crate::error::Result;

/// Observes operators while it lives, and discards unread records when it is dropped.
struct Observer;

impl Observer {
    fn start() -> Result<Observer> {
        ffi::observe_operators(true)?;
        Ok(Observer)
    }

    fn finish(self) -> Result<Vec<ffi::OperatorRecord>> {
        ffi::observe_operators(false)?;
        Ok(ffi::take_operators())
    }
}

impl Drop for Observer {
    fn drop(&mut self) {
        // Observation is still on only if the body panicked, and then the records are not read.
        let _ = ffi::observe_operators(false);
        drop(ffi::take_operators());
    }
}

/// Runs `body` and returns every operator that ran meanwhile on any thread, in the order of their ends. Only one
/// recording may be active in a process.
pub fn record<T>(body: impl FnOnce() -> T) -> Result<(T, Vec<Operator>)> {
    let observer = Observer::start()?;
    let out = body();
    let operators = observer
        .finish()?
        .into_iter()
        .map(|r| {
            let mut shapes = shapes(&r.shapes);
            shapes.push(r.output_shape);
            let flops = flops(&r.name, &shapes);
            shapes.pop();
            Operator {
                flops,
                name: r.name,
                shapes,
                input_bytes: r.input_bytes,
                output_bytes: r.output_bytes,
                started_ns: r.started_ns,
                ended_ns: r.ended_ns,
                thread: r.thread,
            }
        })
        .collect();
    Ok((out, operators))
}

/// Decodes `[num_dims, dims..., num_dims, dims...]`.
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

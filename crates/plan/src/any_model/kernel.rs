//! The time of one kernel by a roofline: the longer of its arithmetic and its memory traffic.

use trainyard_trace::Calls;

use crate::ComputeModel;

/// How much slower products of 32-bit numbers are than those of 16-bit numbers, without tensor cores. An assumption:
/// 312 and 19.5 teraflops of an A100, 989 and 67 of an H100.
const FLOAT32_SLOWDOWN: f64 = 16.0;

/// The same for convolutions, which use TF32 by default.
const TF32_SLOWDOWN: f64 = 2.0;

/// Seconds of these calls on the device; 0 if they start no kernel.
pub(super) fn seconds(model: &ComputeModel<'_>, calls: &Calls) -> f64 {
    let Some(kernel) = calls.kernel else {
        return 0.0;
    };
    let moved = model.stream(kernel.total() as f64);
    let arithmetic = match calls.flops {
        0 => 0.0,
        _ if calls.name.contains("attention") => attention(model, calls),
        _ => product(model, calls, kernel.written as f64),
    };
    calls.count as f64 * moved.max(arithmetic)
}

/// A matrix product or a convolution: every element of its result is a dot product.
fn product(model: &ComputeModel<'_>, calls: &Calls, written: f64) -> f64 {
    let elements = (written / element_bytes(calls)).max(1.0);
    let depth = (calls.flops as f64 / (2.0 * elements)).max(1.0);
    model.matmul_at(peak(model, calls), elements, depth)
}

fn attention(model: &ComputeModel<'_>, calls: &Calls) -> f64 {
    calls.flops as f64 / (peak(model, calls) * model.constants.flash)
}

/// The peak for the type of the inputs.
fn peak(model: &ComputeModel<'_>, calls: &Calls) -> f64 {
    // Attention reads a few 32-bit numbers beside 16-bit ones.
    let is_wide = element_bytes(calls) >= 3.0;
    let slowdown = match is_wide.then(|| calls.name.contains("convolution")) {
        None => 1.0,
        Some(true) => TF32_SLOWDOWN,
        Some(false) => FLOAT32_SLOWDOWN,
    };
    model.accelerator.peak.value / slowdown
}

/// The mean size of an element of the inputs.
fn element_bytes(calls: &Calls) -> f64 {
    let read = calls.kernel.map_or(0, |kernel| kernel.read);
    read as f64 / calls.elements.max(1) as f64
}

#[cfg(test)]
mod tests {
    use trainyard_trace::KernelBytes;

    use super::*;
    use crate::{Cluster, Constants};

    /// A product of two matrices of `size x size`.
    fn mm(size: u64, element_bytes: u64) -> Calls {
        Calls {
            name: "aten::mm".to_owned(),
            flops: 2 * size.pow(3),
            elements: 2 * size * size,
            kernel: Some(KernelBytes {
                read: 2 * size * size * element_bytes,
                written: size * size * element_bytes,
            }),
            count: 2,
            ..Calls::default()
        }
    }

    #[test]
    fn large_products_are_bound_by_arithmetic_and_small_ones_by_memory() {
        let cluster: Cluster = "8xH100".parse().unwrap();
        let constants = Constants::prior();
        let model = ComputeModel {
            accelerator: &cluster.accelerator,
            constants: &constants,
        };
        let large = seconds(&model, &mm(8192, 2));
        let as_matmul = 2.0 * model.matmul(1.0, 8192.0, 8192.0, 8192.0);
        assert!((large / as_matmul - 1.0).abs() < 1e-9);
        assert!(seconds(&model, &mm(8192, 4)) > 5.0 * large);
        let mut add = mm(1024, 2);
        add.flops = 0;
        let bytes = 3.0 * 1024.0 * 1024.0 * 2.0;
        assert_eq!(seconds(&model, &add), 2.0 * model.stream(bytes));
        let view = Calls {
            kernel: None,
            ..add
        };
        assert_eq!(seconds(&model, &view), 0.0);
    }
}

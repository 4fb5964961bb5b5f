//! Matrix products to compute between collectives, as in training.

use tch::{Device, Kind, Tensor};

/// Matrix products whose weights do not fit into the CPU cache.
pub struct Matmuls {
    input: Tensor,
    weights: Vec<Tensor>,
}

const WIDTH: i64 = 512;
const ROWS: i64 = 256;
const NUM_WEIGHTS: usize = 32;

impl Matmuls {
    /// Allocates the operands; their values do not matter.
    pub fn new() -> Matmuls {
        let full = |rows| Tensor::full([rows, WIDTH], 1e-3, (Kind::Float, Device::Cpu));
        Matmuls {
            input: full(ROWS),
            weights: (0..NUM_WEIGHTS).map(|_| full(WIDTH)).collect(),
        }
    }

    /// Computes `num` products, one after the other.
    pub fn compute(&self, num: usize) {
        for weight in self.weights.iter().cycle().take(num) {
            drop(self.input.matmul(weight));
        }
    }
}

//! Something to compute between messages, as ranks that train do.

use tch::{Device, Kind, Tensor};

/// Products with more weights than a cache holds.
pub struct Products {
    input: Tensor,
    weights: Vec<Tensor>,
}

const WIDTH: i64 = 512;
const ROWS: i64 = 256;
const NUM_WEIGHTS: usize = 32;

impl Products {
    /// With weights that do not matter.
    pub fn new() -> Products {
        let full = |rows| Tensor::full([rows, WIDTH], 1e-3, (Kind::Float, Device::Cpu));
        Products {
            input: full(ROWS),
            weights: (0..NUM_WEIGHTS).map(|_| full(WIDTH)).collect(),
        }
    }

    /// Computes that many of them, one after the other.
    pub fn compute(&self, num: usize) {
        for weight in self.weights.iter().cycle().take(num) {
            drop(self.input.matmul(weight));
        }
    }
}

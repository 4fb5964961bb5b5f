//! Dropout with a counter-based mask.
//!
//! Whether an element is dropped depends only on the seed, the step, the layer's name and the element's index in the
//! global batch. So the mask does not depend on how ranks shard the batch, recomputation drops the same elements, and
//! backward needs no saved mask.

use std::sync::Arc;

use tch::Tensor;
use trainyard_torch::{TorchError, autograd, device, meta};

use crate::init::{GOLDEN, fnv1a64, splitmix64_mix};
use crate::{Builder, Context, Result, SequenceParallel};

/// Dropout of activations [batch, positions, width].
#[derive(Debug)]
pub struct Dropout {
    /// A hash of the seed and the name.
    key: u64,
    probability: f64,
    layout: Arc<RowLayout>,
}

/// The mapping from local rows to rows of the global batch.
#[derive(Debug)]
struct RowLayout {
    /// The length of a full sequence.
    seq_len: u64,
    /// The positions of this rank, before sequence parallelism.
    positions: Vec<u64>,
    /// This rank's index in the sequence-parallel group.
    shard: u64,
}

impl RowLayout {
    /// The row of the global batch of local row `number` of `num_rows`.
    fn row(&self, number: u64, num_rows: u64, first_sample: u64) -> u64 {
        let flat = self.shard * num_rows + number;
        let length = self.positions.len() as u64;
        let position = self.positions[(flat % length) as usize];
        (first_sample + flat / length) * self.seq_len + position
    }
}

impl Dropout {
    /// Dropout with `probability` for sequences of `seq_len` positions.
    pub fn build(builder: &Builder, seq_len: usize, probability: f64) -> Result<Dropout> {
        let tp = builder.tensor_parallel();
        let positions = builder.context_parallel().positions(seq_len)?;
        let shard = match tp.sequence_parallel() {
            SequenceParallel::Disabled => 0,
            SequenceParallel::SaveGathered | SequenceParallel::Regather => tp.index() as u64,
        };
        Ok(Dropout {
            key: fnv1a64(builder.path()) ^ builder.seed().wrapping_mul(GOLDEN),
            probability,
            layout: Arc::new(RowLayout {
                seq_len: seq_len as u64,
                positions: positions.into_iter().flatten().map(|p| p as u64).collect(),
                shard,
            }),
        })
    }

    /// The two dropout layers of a block, with these names; `None` if the probability is 0.
    pub fn pair(
        builder: &Builder,
        names: [&str; 2],
        seq_len: usize,
        probability: f64,
    ) -> Result<Option<[Dropout; 2]>> {
        let build = |name| Dropout::build(&builder.push(name), seq_len, probability);
        if probability > 0.0 {
            Ok(Some([build(names[0])?, build(names[1])?]))
        } else {
            Ok(None)
        }
    }

    /// Drops elements of `x` and scales the rest to keep the mean; returns `x` in evaluation.
    pub fn forward(&self, x: &Tensor, cx: &Context) -> Result<Tensor> {
        if !cx.training {
            return Ok(x.shallow_clone());
        }
        let (mask, backward_mask) = (self.mask(cx), self.mask(cx));
        Ok(autograd::apply(
            &[x],
            |_, inputs| mask.apply(inputs[0]),
            move |_, gradients| match gradients {
                [Some(gradient)] => Ok(vec![Some(backward_mask.apply(gradient)?)]),
                _ => Ok(vec![None]),
            },
        )?)
    }

    fn mask(&self, cx: &Context) -> Mask {
        Mask {
            key: splitmix64_mix(self.key.wrapping_add(cx.step.wrapping_mul(GOLDEN))),
            probability: self.probability,
            first_sample: cx.first_sample,
            layout: Arc::clone(&self.layout),
        }
    }
}

/// The mask of one pass.
struct Mask {
    key: u64,
    probability: f64,
    first_sample: u64,
    layout: Arc<RowLayout>,
}

impl Mask {
    fn apply(&self, x: &Tensor) -> Result<Tensor, TorchError> {
        let scaled = x.f_mul_scalar(1.0 / (1.0 - self.probability))?;
        if meta::is_meta(x) {
            return Ok(scaled);
        }
        let width = x.size().last().copied().unwrap_or(1).max(1) as u64;
        let keep = self.keep_mask(x.numel() as u64 / width, width);
        let keep = device::from_slice(&keep, x.device())?.f_view_as(x)?;
        Ok(scaled.f_mul(&keep)?)
    }

    /// Whether each element is kept.
    fn keep_mask(&self, num_rows: u64, width: u64) -> Vec<bool> {
        let threshold = (self.probability * (1u64 << 32) as f64) as u64;
        let rows = (0..num_rows).map(|row| self.layout.row(row, num_rows, self.first_sample));
        rows.flat_map(|row| row * width..(row + 1) * width)
            .map(|index| {
                let counter = index.wrapping_add(1).wrapping_mul(GOLDEN);
                splitmix64_mix(self.key.wrapping_add(counter)) >> 32 >= threshold
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    fn dropout(name: &str) -> Dropout {
        Dropout::build(&Builder::new(5).push(name), 8, 0.25).unwrap()
    }

    fn ones(batch: i64) -> Tensor {
        Tensor::ones([batch, 8, 64], (Kind::Double, Device::Cpu))
    }

    #[test]
    fn drops_the_given_share_and_keeps_the_mean() -> Result<()> {
        let output = dropout("a").forward(&ones(16), &Context::training(3))?;
        let share = f64::try_from(output.eq(0).to_kind(Kind::Double).mean(Kind::Double))?;
        assert!((share - 0.25).abs() < 0.01, "{share}");
        assert!((f64::try_from(output.mean(Kind::Double))? - 1.0).abs() < 0.02);
        assert!(
            dropout("a")
                .forward(&ones(2), &Context::evaluation(3))?
                .equal(&ones(2))
        );
        Ok(())
    }

    #[test]
    fn backward_drops_the_same_elements() -> Result<()> {
        let x = ones(2).set_requires_grad(true);
        let output = dropout("a").forward(&x, &Context::training(1))?;
        output.sum(Kind::Double).backward();
        assert!(x.grad().equal(&output.detach()));
        Ok(())
    }

    #[test]
    fn the_mask_depends_on_name_step_and_sample_but_not_on_the_batch_split() -> Result<()> {
        let cx = Context::training(2);
        let all = dropout("a").forward(&ones(4), &cx)?;
        let last = dropout("a").forward(&ones(1), &cx.clone().at_sample(3))?;
        assert!(all.narrow(0, 3, 1).equal(&last));
        assert!(!dropout("b").forward(&ones(4), &cx)?.equal(&all));
        assert!(
            !dropout("a")
                .forward(&ones(4), &Context::training(3))?
                .equal(&all)
        );
        Ok(())
    }
}

//! Leaving out a share of the elements, chosen by a counter.
//!
//! Whether an element stays depends on the seed, the step, the layer's name and the element's place in
//! the global batch, and on nothing else. So ranks that share a batch, a sequence or its positions
//! leave out what one rank would, a part that is run again leaves out the same, and nothing has to be
//! kept for backward but the counter.

use std::sync::Arc;

use tch::Tensor;
use trainyard_torch::{TorchError, autograd, meta};

use crate::init::{GOLDEN, fnv1a64, splitmix64_mix};
use crate::{Builder, Context, Result, Sequence};

/// Dropout of positions' features [batch, positions, width].
#[derive(Debug)]
pub struct Dropout {
    /// Of seed and name.
    key: u64,
    probability: f64,
    places: Arc<Places>,
}

/// Which rows of the global batch a rank has.
#[derive(Debug)]
struct Places {
    /// Positions of a whole sequence.
    seq_len: u64,
    /// Those this rank has of each, before tensor-parallel ranks divide them.
    positions: Vec<u64>,
    /// Which of the parts into which they divide the tokens of a batch.
    part: u64,
}

impl Places {
    /// The row of the global batch that the `number`th of `num_rows` local rows is.
    fn row(&self, number: u64, num_rows: u64, first_sample: u64) -> u64 {
        let flat = self.part * num_rows + number;
        let length = self.positions.len() as u64;
        let position = self.positions[(flat % length) as usize];
        (first_sample + flat / length) * self.seq_len + position
    }
}

impl Dropout {
    /// Leaves out a share of `probability` of sequences of `seq_len` positions.
    pub fn build(builder: &Builder, seq_len: usize, probability: f64) -> Result<Dropout> {
        let tp = builder.tensor_parallel();
        let positions = builder.context_parallel().positions(seq_len)?;
        let part = match tp.sequence() {
            Sequence::Whole => 0,
            Sequence::Kept | Sequence::Regathered => tp.index() as u64,
        };
        Ok(Dropout {
            key: fnv1a64(builder.path()) ^ builder.seed().wrapping_mul(GOLDEN),
            probability,
            places: Arc::new(Places {
                seq_len: seq_len as u64,
                positions: positions.into_iter().flatten().map(|p| p as u64).collect(),
                part,
            }),
        })
    }

    /// The two of a block, under these names; none where nothing is left out.
    pub fn pair(
        builder: &Builder,
        names: [&str; 2],
        seq_len: usize,
        probability: f64,
    ) -> Result<Option<[Dropout; 2]>> {
        let build = |name| Dropout::build(&builder.at(name), seq_len, probability);
        match probability > 0.0 {
            true => Ok(Some([build(names[0])?, build(names[1])?])),
            false => Ok(None),
        }
    }

    /// What is left of `x`, scaled so that its mean stays; all of it unless training.
    pub fn forward(&self, x: &Tensor, cx: &Context) -> Result<Tensor> {
        if !cx.training {
            return Ok(x.shallow_clone());
        }
        let (mask, again) = (self.mask(cx), self.mask(cx));
        Ok(autograd::single(
            &[x],
            |_, inputs| mask.applied(inputs[0]),
            move |_, gradients| match gradients {
                [Some(gradient)] => Ok(vec![Some(again.applied(gradient)?)]),
                _ => Ok(vec![None]),
            },
        )?)
    }

    fn mask(&self, cx: &Context) -> Mask {
        Mask {
            key: splitmix64_mix(self.key.wrapping_add(cx.step.wrapping_mul(GOLDEN))),
            probability: self.probability,
            first_sample: cx.first_sample,
            places: Arc::clone(&self.places),
        }
    }
}

/// Which elements stay in one pass.
struct Mask {
    key: u64,
    probability: f64,
    first_sample: u64,
    places: Arc<Places>,
}

impl Mask {
    fn applied(&self, x: &Tensor) -> Result<Tensor, TorchError> {
        let scaled = x.f_mul_scalar(1.0 / (1.0 - self.probability))?;
        if meta::is_meta(x) {
            return Ok(scaled);
        }
        let width = x.size().last().copied().unwrap_or(1).max(1) as u64;
        let stays = Tensor::f_from_slice(&self.stays(x.numel() as u64 / width, width))?;
        let stays = stays.f_view_as(x)?.f_to_device(x.device())?;
        Ok(scaled.f_mul(&stays)?)
    }

    /// For every element, whether it stays.
    fn stays(&self, num_rows: u64, width: u64) -> Vec<bool> {
        let threshold = (self.probability * (1u64 << 32) as f64) as u64;
        let rows = (0..num_rows).map(|row| self.places.row(row, num_rows, self.first_sample));
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
        Dropout::build(&Builder::new(5).at(name), 8, 0.25).unwrap()
    }

    fn ones(batch: i64) -> Tensor {
        Tensor::ones([batch, 8, 64], (Kind::Double, Device::Cpu))
    }

    #[test]
    fn leaves_out_the_share_and_keeps_the_mean() -> Result<()> {
        let left = dropout("a").forward(&ones(16), &Context::training(3))?;
        let share = f64::try_from(left.eq(0).to_kind(Kind::Double).mean(Kind::Double))?;
        assert!((share - 0.25).abs() < 0.01, "{share}");
        assert!((f64::try_from(left.mean(Kind::Double))? - 1.0).abs() < 0.02);
        assert!(
            dropout("a")
                .forward(&ones(2), &Context::evaluation(3))?
                .equal(&ones(2))
        );
        Ok(())
    }

    #[test]
    fn backward_leaves_out_the_same() -> Result<()> {
        let x = ones(2).set_requires_grad(true);
        let left = dropout("a").forward(&x, &Context::training(1))?;
        left.sum(Kind::Double).backward();
        assert!(x.grad().equal(&left.detach()));
        Ok(())
    }

    #[test]
    fn depends_on_name_step_and_sample_and_not_on_how_a_batch_is_divided() -> Result<()> {
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

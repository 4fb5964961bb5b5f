//! Dropout with a counter-based mask.
//!
//! Whether an element is dropped depends only on the seed, the step, the layer's name and the element's index in the
//! global batch. So the mask does not depend on how ranks shard the batch, recomputation drops the same elements, and
//! backward needs no saved mask.

use std::sync::Arc;

use tch::{Kind, Tensor};
use trainyard_torch::{TorchError, autograd, device, meta};

use crate::init::{GOLDEN, LAST_SHIFT, MIX, fnv1a64, splitmix64_mix};
use crate::{Builder, Context, Result, SequenceParallel};

/// Elements whose mask is computed at a time, in integers of eight bytes, which bounds the temporary memory.
const CHUNK: i64 = 1 << 24;

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
        let width = x.size().last().copied().unwrap_or(1).max(1);
        let num_rows = x.numel() as i64 / width;
        let rows = device::from_slice(&self.first_elements(num_rows, width), x.device())?;
        let rows = rows.f_view([num_rows, 1])?;
        let keep = tch::no_grad(|| -> Result<Tensor, TorchError> {
            let chunks = rows.f_split((CHUNK / width).max(1), 0)?;
            let masks = chunks.iter().map(|rows| self.keep_mask(rows, width));
            Ok(Tensor::f_cat(&masks.collect::<Result<Vec<_>, _>>()?, 0)?)
        })?;
        Ok(scaled.f_mul(&keep.f_view_as(x)?)?)
    }

    /// The index in the global batch of the first element of each row.
    fn first_elements(&self, num_rows: i64, width: i64) -> Vec<i64> {
        let row = |number| {
            self.layout
                .row(number, num_rows as u64, self.first_sample)
                .wrapping_mul(width as u64) as i64
        };
        (0..num_rows as u64).map(row).collect()
    }

    /// Whether each element is kept, by [`splitmix64_mix`] of its index. On the device, in wrapping 64-bit integers.
    fn keep_mask(&self, rows: &Tensor, width: i64) -> Result<Tensor, TorchError> {
        let threshold = (self.probability * (1u64 << 32) as f64) as i64;
        let columns = Tensor::f_arange(width, (Kind::Int64, rows.device()))?;
        let mut z = columns.f_add(rows)?;
        let _ = z
            .f_add_scalar_(1)?
            .f_mul_scalar_(GOLDEN as i64)?
            .f_add_scalar_(self.key as i64)?;
        for (shift, factor) in MIX {
            let shifted = shift_right(&z, shift)?;
            let _ = z
                .f_bitwise_xor_tensor_(&shifted)?
                .f_mul_scalar_(factor as i64)?;
        }
        let shifted = shift_right(&z, LAST_SHIFT)?;
        let _ = z.f_bitwise_xor_tensor_(&shifted)?;
        Ok(shift_right(&z, 32)?.f_ge(threshold)?)
    }
}

/// Shifts the bits of 64-bit integers, as if they were unsigned.
fn shift_right(z: &Tensor, bits: u32) -> Result<Tensor, TorchError> {
    let mut shifted = z.f_bitwise_right_shift_tensor_scalar(i64::from(bits))?;
    Ok(shifted.f_bitwise_and_((u64::MAX >> bits) as i64)?)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tch::{Device, Kind};

    use super::*;

    fn dropout(name: &str) -> Dropout {
        Dropout::build(&Builder::new(5).push(name), 8, 0.25).unwrap()
    }

    fn ones(batch: i64) -> Tensor {
        Tensor::ones([batch, 8, 64], (Kind::Double, Device::Cpu))
    }

    proptest! {
        #[test]
        fn masks_on_the_device_are_those_of_the_generator(
            key: u64, first_sample in 0u64..1 << 40, probability in 0.01f64..0.99,
        ) {
            let layout = Arc::clone(&dropout("a").layout);
            let mask = Mask { key, probability, first_sample, layout };
            let kept = mask.apply(&Tensor::ones([2, 8, 5], (Kind::Float, Device::Cpu))).unwrap().ne(0);
            let threshold = (probability * (1u64 << 32) as f64) as u64;
            let expected: Vec<bool> = (first_sample * 8 * 5..(first_sample + 2) * 8 * 5)
                .map(|index| (index + 1).wrapping_mul(GOLDEN))
                .map(|counter| splitmix64_mix(key.wrapping_add(counter)) >> 32 >= threshold)
                .collect();
            prop_assert_eq!(Vec::<bool>::try_from(kept.reshape(-1i64)).unwrap(), expected);
        }
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

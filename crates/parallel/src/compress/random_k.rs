//! Random sparsification: every step sums other numbers.

use tch::{Kind, Tensor};
use trainyard_cost::Volume;
use trainyard_nn::init::splitmix64;
use trainyard_torch::{Group, ReduceOp, Result, Work, device, meta};

use super::error_feedback::{corrected, keep};
use super::hook::{GradientBucket, GradientHook, Reduction, all_reduce_volume};

/// All-reduces one of every `stride` gradients, with error feedback. All ranks choose the same ones, at random by step, so
/// that no places are sent.
#[derive(Debug, Clone, Copy)]
pub struct RandomK {
    stride: usize,
}

impl RandomK {
    /// Sends this share of the gradients.
    pub fn new(share: f64) -> RandomK {
        RandomK {
            stride: (1.0 / share).round().max(1.0) as usize,
        }
    }

    fn num_chosen(&self, length: usize) -> usize {
        length.div_ceil(self.stride)
    }

    /// The chosen places of a bucket.
    fn places(&self, bucket: &GradientBucket<'_>) -> Vec<i64> {
        let length = bucket.flat.numel();
        let seed = splitmix64(splitmix64(bucket.step) ^ bucket.index as u64);
        let place = |number: usize| {
            let first = number * self.stride;
            let choices = self.stride.min(length - first) as u64;
            first as i64 + (splitmix64(seed ^ number as u64) % choices) as i64
        };
        (0..self.num_chosen(length)).map(place).collect()
    }
}

struct InFlight {
    work: Work,
    values: Tensor,
    places: Tensor,
    flat: Tensor,
}

impl GradientHook for RandomK {
    fn reduce(
        &self,
        group: &Group,
        bucket: &GradientBucket<'_>,
        op: ReduceOp,
    ) -> Result<Box<dyn Reduction>> {
        let corrected = corrected(bucket.flat, bucket.error)?;
        let places = if meta::is_meta(&corrected) {
            let length = self.num_chosen(corrected.numel()) as i64;
            corrected.f_narrow(0, 0, length)?.f_to_kind(Kind::Int64)?
        } else {
            device::from_slice(&self.places(bucket), corrected.device())?
        };
        let values = corrected.f_index_select(0, &places)?;
        let sent = corrected
            .f_zeros_like()?
            .f_index_copy(0, &places, &values)?;
        keep(bucket.error, &corrected, &sent)?;
        Ok(Box::new(InFlight {
            work: group.all_reduce(&values, op, bucket.purpose)?,
            values,
            places,
            flat: bucket.flat.shallow_clone(),
        }))
    }

    fn volume(&self, bucket: &GradientBucket<'_>, num_ranks: usize) -> Volume {
        let length = self.num_chosen(bucket.flat.numel());
        all_reduce_volume(length, Kind::Float, num_ranks)
    }

    fn keeps_errors(&self) -> bool {
        true
    }
}

impl Reduction for InFlight {
    fn finish(self: Box<Self>) -> Result<()> {
        self.work.wait()?;
        let mut flat = self.flat;
        let values = self.values.f_to_kind(flat.kind())?;
        let _ = tch::no_grad(|| flat.f_zero_()?.f_index_copy_(0, &self.places, &values))?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use tch::Device;

    use super::*;

    /// Every gradient is chosen at some step, and each step chooses one of every stride.
    #[test]
    fn all_places_are_reached() {
        let flat = Tensor::zeros([103], (Kind::Float, Device::Cpu));
        let hook = RandomK::new(0.1);
        let mut reached = BTreeSet::new();
        for step in 0..200 {
            let bucket = GradientBucket {
                index: 0,
                step,
                purpose: trainyard_trace::Purpose::Gradient,
                flat: &flat,
                members: Vec::new(),
                error: None,
            };
            let places = hook.places(&bucket);
            let strides: Vec<i64> = places.iter().map(|place| place / 10).collect();
            assert_eq!(strides, (0..11).collect::<Vec<_>>());
            reached.extend(places);
        }
        assert_eq!(reached, (0..103).collect());
    }
}

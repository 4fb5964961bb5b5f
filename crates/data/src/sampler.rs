//! The distributed sampler: the samples of a rank in a micro-batch of a step.
//!
//! The global batch of a step is a range of consecutive positions. Each rank has a contiguous part of it,
//! and each micro-batch a contiguous part of that. So the samples of a step and their order are the same on
//! any number of ranks.

use std::ops::Range;

use crate::DataError;

/// Divides the positions of every step over ranks and micro-batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sampler {
    local: u64,
    num_ranks: u64,
    num_microbatches: u64,
    first: u64,
}

impl Sampler {
    /// A sampler for steps of `global_batch` samples, on `num_ranks` data-parallel ranks with
    /// `num_microbatches` each.
    pub fn new(
        global_batch: usize,
        num_ranks: usize,
        num_microbatches: usize,
    ) -> Result<Sampler, DataError> {
        let parts = num_ranks.checked_mul(num_microbatches).unwrap_or_default();
        if parts == 0 || global_batch == 0 || !global_batch.is_multiple_of(parts) {
            return Err(DataError::Setting(format!(
                "a global batch of {global_batch} cannot be divided evenly over {num_ranks} ranks \
                 with {num_microbatches} micro-batches each: use a multiple of {}",
                parts.max(1)
            )));
        }
        Ok(Sampler {
            local: (global_batch / parts) as u64,
            num_ranks: num_ranks as u64,
            num_microbatches: num_microbatches as u64,
            first: 0,
        })
    }

    /// This sampler with step 0 at position `first`, for a run that resumes after `first` samples, possibly
    /// with another global batch size.
    pub fn starting_at(self, first: u64) -> Sampler {
        Sampler { first, ..self }
    }

    /// Samples of one micro-batch on one rank.
    pub fn local_batch(&self) -> u64 {
        self.local
    }

    /// Samples of one step over all ranks.
    pub fn global_batch(&self) -> u64 {
        self.local * self.num_ranks * self.num_microbatches
    }

    /// Micro-batches of one step on one rank.
    pub fn num_microbatches(&self) -> u64 {
        self.num_microbatches
    }

    /// The positions that `rank` computes in micro-batch `microbatch` of `step`.
    pub fn positions(
        &self,
        step: u64,
        microbatch: u64,
        rank: u64,
    ) -> Result<Range<u64>, DataError> {
        if microbatch >= self.num_microbatches || rank >= self.num_ranks {
            return Err(DataError::Setting(format!(
                "micro-batch {microbatch} on rank {rank} is out of range: the sampler has {} micro-batches \
                 and {} ranks",
                self.num_microbatches, self.num_ranks
            )));
        }
        let within = (rank * self.num_microbatches + microbatch) * self.local;
        let start = step
            .checked_mul(self.global_batch())
            .and_then(|start| start.checked_add(self.first)?.checked_add(within));
        match start.and_then(|start| Some(start..start.checked_add(self.local)?)) {
            Some(positions) => Ok(positions),
            None => Err(DataError::Setting(format!(
                "step {step} with a global batch size of {} overflows the 64-bit sample counter",
                self.global_batch()
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn ranks_and_microbatches_cover_the_global_batch_in_order(
            local in 1usize..6,
            ranks in 1usize..9,
            microbatches in 1usize..5,
            step in 0u64..1000,
            first in 0u64..1000,
        ) {
            let batch = local * ranks * microbatches;
            let sampler = Sampler::new(batch, ranks, microbatches).unwrap().starting_at(first);
            let all: Vec<_> = (0..ranks as u64)
                .flat_map(|rank| (0..microbatches as u64).map(move |m| (rank, m)))
                .flat_map(|(rank, m)| sampler.positions(step, m, rank).unwrap())
                .collect();
            let start = first + step * batch as u64;
            prop_assert_eq!(all, (start..start + batch as u64).collect::<Vec<_>>());
        }

        #[test]
        fn never_panics(
            batch in 1usize..,
            parts in (1usize..9, 1usize..9),
            step: u64,
            indices in (0u64..9, 0u64..9),
            first: u64,
        ) {
            if let Ok(sampler) = Sampler::new(batch, parts.0, parts.1) {
                let _ = sampler.starting_at(first).positions(step, indices.0, indices.1);
            }
        }
    }

    #[test]
    fn indivisible_batches_are_rejected() {
        let message = Sampler::new(10, 2, 2).unwrap_err().to_string();
        assert!(message.ends_with("use a multiple of 4"), "{message}");
        assert!(Sampler::new(0, 1, 1).is_err());
        assert!(Sampler::new(8, 0, 1).is_err());
        assert!(Sampler::new(8, usize::MAX, 2).is_err());
        assert!(Sampler::new(8, 2, 1).unwrap().positions(0, 0, 2).is_err());
    }
}

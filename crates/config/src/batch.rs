//! How the samples of one optimizer step are divided over ranks and micro-batches.

use crate::{Config, ConfigError};

/// The samples of one step: `global = local x ranks x num_microbatches`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batching {
    /// Samples per optimizer step over all ranks.
    pub global: usize,
    /// Micro-batch size: samples per rank and forward pass.
    pub local: usize,
    /// The number of data-parallel ranks.
    pub ranks: usize,
    /// Micro-batches per rank and optimizer step.
    pub num_microbatches: usize,
}

impl Batching {
    /// Micro-batches of all ranks per optimizer step.
    pub fn num_global_microbatches(&self) -> u64 {
        (self.ranks * self.num_microbatches) as u64
    }
}

impl Config {
    /// Divides the global batch over `ranks` data-parallel ranks. If it is larger than one micro-batch per rank, ranks
    /// accumulate gradients.
    pub fn batching(&self, ranks: usize) -> Result<Batching, ConfigError> {
        let local = self.training.local_batch_size;
        let at_once = local.checked_mul(ranks).filter(|&samples| samples > 0);
        let Some(at_once) = at_once else {
            return Err(ConfigError::contradiction(
                format!(
                    "training.local_batch_size = {local} on a world of size {ranks} is an empty batch"
                ),
                "use at least one sample and one rank",
            ));
        };
        let global = self.training.global_batch_size.unwrap_or(at_once);
        if global == 0 || !global.is_multiple_of(at_once) {
            return Err(uneven(global, local, ranks, at_once));
        }
        Ok(Batching {
            global,
            local,
            ranks,
            num_microbatches: global / at_once,
        })
    }
}

fn uneven(global: usize, local: usize, ranks: usize, at_once: usize) -> ConfigError {
    let times = (global / at_once + usize::from(global % at_once >= at_once.div_ceil(2))).max(1);
    let nearest = at_once.saturating_mul(times);
    let mut remedy = format!("the nearest valid choice is training.global_batch_size = {nearest}");
    if global > 0 && global.is_multiple_of(ranks) {
        let even = global / ranks;
        remedy += &format!(", or training.local_batch_size = {even}");
    }
    ConfigError::contradiction(
        format!(
            "training.global_batch_size = {global} is not a multiple of \
             training.local_batch_size x data-parallel ranks = {local} x {ranks} = {at_once}"
        ),
        remedy,
    )
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn config(local: usize, global: Option<usize>) -> Config {
        let mut config = Config::default();
        config.training.local_batch_size = local;
        config.training.global_batch_size = global;
        config
    }

    #[test]
    fn indivisible_batches_are_rejected_with_the_nearest() {
        let message = |local, global, ranks| {
            let rejected = config(local, Some(global)).batching(ranks);
            rejected.unwrap_err().to_string()
        };
        let text = message(4, 10, 2);
        assert!(text.contains("4 x 2 = 8"), "{text}");
        assert!(text.contains("training.global_batch_size = 8, or training.local_batch_size = 5"));
        assert!(message(4, 13, 2).ends_with("global_batch_size = 16"));
        assert!(message(8, 1, 4).ends_with("global_batch_size = 32"));
    }

    proptest! {
        #[test]
        fn parts_make_the_whole(local in 1usize..9, ranks in 1usize..9, times in 1usize..9) {
            let whole = local * ranks * times;
            let batching = config(local, Some(whole)).batching(ranks).unwrap();
            prop_assert_eq!(batching.num_microbatches, times);
            prop_assert_eq!(batching.local * batching.ranks * batching.num_microbatches, whole);
            let default = config(local, None).batching(ranks).unwrap();
            prop_assert_eq!((default.global, default.num_microbatches), (local * ranks, 1));
        }

        #[test]
        fn never_panics(local: usize, global: Option<usize>, ranks: usize) {
            let _ = config(local, global).batching(ranks);
        }
    }
}

//! Masked tokens, which an encoder learns to restore.

use std::sync::Arc;

use crate::order::mix;
use crate::{Array, DataError, IGNORE_INDEX, Sample, Source, Values};

/// One of so many tokens is masked.
const ONE_OF: u64 = 7;

/// The sequences of another source with some tokens replaced by a mask, and those tokens as the only targets. Which are masked
/// depends on the seed, the sample and the position alone.
pub struct MaskedTokens {
    source: Arc<dyn Source>,
    mask_token_id: i64,
    seed: u64,
}

impl MaskedTokens {
    /// Masks tokens of `source` by `mask_token_id`.
    pub fn new(source: Arc<dyn Source>, mask_token_id: i64, seed: u64) -> MaskedTokens {
        MaskedTokens {
            source,
            mask_token_id,
            seed,
        }
    }

    /// Which positions of a sample are masked: at least one, so that every batch has a target.
    fn mask_of(&self, index: u64, length: usize) -> Vec<bool> {
        let of_sample = mix(self.seed ^ mix(index.wrapping_add(1)));
        let is_chosen = |position: u64| mix(of_sample ^ mix(position + 1)).is_multiple_of(ONE_OF);
        let mut mask: Vec<bool> = (0..length as u64).map(is_chosen).collect();
        if !mask.contains(&true)
            && let Some(first) = mask.first_mut()
        {
            *first = true;
        }
        mask
    }
}

impl Source for MaskedTokens {
    fn len(&self) -> Option<u64> {
        self.source.len()
    }

    fn sample(&self, index: u64) -> Result<Sample, DataError> {
        let sample = self.source.sample(index)?;
        let Values::Int(tokens) = sample.inputs.values else {
            return Err(DataError::Setting(
                "only tokens can be masked, but the dataset has floats".to_owned(),
            ));
        };
        let is_masked = self.mask_of(index, tokens.len());
        let choose = |masked: &dyn Fn(i64) -> i64, others: &dyn Fn(i64) -> i64| -> Vec<i64> {
            let each = tokens.iter().zip(&is_masked);
            each.map(|(&token, &is_masked)| {
                if is_masked {
                    masked(token)
                } else {
                    others(token)
                }
            })
            .collect()
        };
        Ok(Sample {
            inputs: Array::ints(choose(&|_| self.mask_token_id, &|token| token)),
            targets: Array::ints(choose(&|token| token, &|_| IGNORE_INDEX)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SyntheticTokens;

    #[test]
    fn masked_tokens_are_the_only_targets() {
        let plain = Arc::new(SyntheticTokens::new(64, 100, 3).unwrap());
        let masked = MaskedTokens::new(plain.clone(), 99, 5);
        let mut num_masked = 0;
        for index in 0..50 {
            let (plain, sample) = (plain.sample(index).unwrap(), masked.sample(index).unwrap());
            assert_eq!(sample, masked.sample(index).unwrap());
            let ints = |array: &Array| match &array.values {
                Values::Int(values) => values.clone(),
                Values::Float(_) => Vec::new(),
            };
            let (plain, inputs) = (ints(&plain.inputs), ints(&sample.inputs));
            for (position, target) in ints(&sample.targets).into_iter().enumerate() {
                if target == IGNORE_INDEX {
                    assert_eq!(inputs[position], plain[position]);
                } else {
                    assert_eq!((inputs[position], target), (99, plain[position]));
                    num_masked += 1;
                }
            }
        }
        let share = f64::from(num_masked) / (50.0 * 64.0);
        assert!((0.12..0.17).contains(&share), "{share}");
    }

    #[test]
    fn every_sample_has_a_target() {
        let plain = Arc::new(SyntheticTokens::new(1, 100, 3).unwrap());
        let masked = MaskedTokens::new(plain, 99, 5);
        for index in 0..50 {
            assert_eq!(masked.sample(index).unwrap().targets.num_targets(), 1);
        }
    }
}

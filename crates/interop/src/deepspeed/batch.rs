//! The batch sizes: `train_batch_size = micro-batch x accumulation steps x data-parallel ranks`.

use trainyard_config::TrainingSection;

use super::super::FrameworkError;
use super::FRAMEWORK;
use super::file::{AUTO, File};

pub(super) const GLOBAL: &str = "train_batch_size";
pub(super) const MICRO: &str = "train_micro_batch_size_per_gpu";
pub(super) const STEPS: &str = "gradient_accumulation_steps";

/// The batch sizes, and the number of data-parallel ranks.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) struct Batch {
    pub global: usize,
    pub micro: usize,
    pub ranks: usize,
}

/// The sizes as the file has them; `"auto"` counts as absent.
#[derive(Copy, Clone, Debug)]
pub(super) struct Sizes {
    pub global: Option<usize>,
    pub micro: Option<usize>,
    pub steps: Option<usize>,
    is_auto: bool,
}

impl Sizes {
    pub fn read(file: &File) -> Result<Sizes, FrameworkError> {
        let (global, micro) = (file.count(GLOBAL)?, file.count(MICRO)?);
        let is_auto = |key: &str| file.has(key) && file.get(key).is_none();
        Ok(Sizes {
            global,
            micro,
            steps: file.count(STEPS)?,
            is_auto: is_auto(GLOBAL) || is_auto(MICRO),
        })
    }

    /// Whether the file leaves all sizes to Trainyard.
    pub fn is_open(&self) -> bool {
        self.global.is_none() && self.micro.is_none()
    }

    /// The number of ranks that all three sizes determine.
    pub fn ranks(&self) -> Result<Option<usize>, FrameworkError> {
        let (Some(global), Some(micro), Some(steps)) = (self.global, self.micro, self.steps) else {
            return Ok(None);
        };
        let at_once = micro
            .checked_mul(steps)
            .filter(|&n| n > 0 && global.is_multiple_of(n));
        let ranks = at_once.map(|n| global / n).filter(|&ranks| ranks > 0);
        match ranks {
            Some(ranks) => Ok(Some(ranks)),
            None => Err(uneven(
                format!("{GLOBAL} {global}"),
                format!("it is not a multiple of {micro} x {steps}"),
            )),
        }
    }

    /// The batch on this many data-parallel ranks. Any two of the three sizes give the third.
    pub fn on(&self, ranks: usize) -> Result<Batch, FrameworkError> {
        let (global, micro) = match (self.global, self.micro) {
            (Some(global), Some(micro)) => {
                self.check_steps(global, micro, ranks)?;
                (global, micro)
            }
            (Some(global), None) => (global, self.micro_of(global, ranks)?),
            (None, Some(micro)) => (self.global_of(micro, ranks)?, micro),
            (None, None) if self.is_auto => {
                let micro = TrainingSection::default().local_batch_size;
                (self.global_of(micro, ranks)?, micro)
            }
            (None, None) => {
                let remedy = format!("give {GLOBAL} or {MICRO}, or {AUTO:?} for Trainyard's value");
                return Err(FRAMEWORK.unspecified("the batch size", remedy));
            }
        };
        Ok(Batch {
            global,
            micro,
            ranks,
        })
    }

    fn check_steps(&self, global: usize, micro: usize, ranks: usize) -> Result<(), FrameworkError> {
        let steps = self.steps.unwrap_or(1);
        let product = micro.checked_mul(ranks).and_then(|n| n.checked_mul(steps));
        if self.steps.is_none() || product == Some(global) {
            return Ok(());
        }
        Err(uneven(
            format!("{GLOBAL} {global}"),
            format!("it is not {micro} x {steps} x {ranks} data-parallel ranks"),
        ))
    }

    fn micro_of(&self, global: usize, ranks: usize) -> Result<usize, FrameworkError> {
        let num_microbatches = ranks
            .checked_mul(self.steps.unwrap_or(1))
            .filter(|&n| n > 0 && global.is_multiple_of(n));
        match num_microbatches {
            Some(number) => Ok(global / number),
            None => Err(uneven(
                format!("{GLOBAL} {global}"),
                format!(
                    "it is not a multiple of the data-parallel ranks, {ranks}, x the accumulation steps"
                ),
            )),
        }
    }

    fn global_of(&self, micro: usize, ranks: usize) -> Result<usize, FrameworkError> {
        let all = micro
            .checked_mul(ranks)
            .and_then(|n| n.checked_mul(self.steps.unwrap_or(1)));
        all.ok_or_else(|| {
            uneven(
                format!("micro-batches of {micro}"),
                "the global batch would be too large".to_owned(),
            )
        })
    }
}

fn uneven(what: String, why: String) -> FrameworkError {
    FRAMEWORK.unsupported(
        what,
        why,
        "use train_batch_size = micro x accumulation x data-parallel ranks",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(text: &str) -> Sizes {
        Sizes::read(&File::parse(text).unwrap()).unwrap()
    }

    #[test]
    fn two_sizes_give_the_third() {
        let batch = |text: &str, ranks| {
            let batch = sizes(text).on(ranks).unwrap();
            (batch.global, batch.micro)
        };
        assert_eq!(batch(r#"{"train_batch_size": 32}"#, 4), (32, 8));
        let text = r#"{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}"#;
        assert_eq!(batch(text, 4), (24, 2));
        let text = r#"{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}"#;
        assert_eq!(batch(text, 4), (32, 8));
    }

    #[test]
    fn sizes_that_disagree_are_rejected() {
        let all = r#"{"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}"#;
        assert_eq!(sizes(all).ranks().unwrap(), Some(4));
        let error = sizes(all).on(2).unwrap_err().to_string();
        assert!(error.contains("4 x 2 x 2 data-parallel ranks"), "{error}");
        assert!(sizes("{}").on(2).unwrap_err().to_string().contains("give"));
        assert!(sizes(r#"{"train_batch_size": 6}"#).on(4).is_err());
    }
}

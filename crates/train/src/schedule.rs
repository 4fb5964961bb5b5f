//! Learning rate schedule: warm-up, constant phase, decay.
//!
//! The rate is a pure function of the step, so that a resumed run needs no schedule state.

use std::f64::consts::PI;

use serde::{Deserialize, Serialize};
use trainyard_config::{Config, DecayType};

/// The learning rate of every step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Schedule {
    /// The highest rate, scaled for the global batch size.
    pub peak_lr: f64,
    /// Number of warm-up steps.
    pub warmup_steps: u64,
    /// The first step of the decay.
    pub decay_start: u64,
    /// Number of decay steps.
    pub decay_steps: u64,
    /// The shape of the decay.
    pub decay: DecayType,
    /// The final rate as a fraction of the peak.
    pub min_lr_factor: f64,
}

impl Schedule {
    /// The schedule of a job with `global_batch` samples per step.
    ///
    /// The decay ends one step after the last, so that no step has a rate of zero. If warm-up and decay
    /// together are longer than the run, the decay is shortened.
    pub fn from_config(config: &Config, global_batch: usize) -> Schedule {
        let (section, steps) = (&config.lr_scheduler, config.training.steps);
        let after_warmup = steps.saturating_sub(section.warmup_steps);
        let requested = section
            .decay_ratio
            .map(|ratio| (ratio * steps as f64).round() as u64);
        let decay_steps = requested.unwrap_or(after_warmup).min(after_warmup);
        Schedule {
            peak_lr: config.optimizer.lr * section.batch_scale(global_batch),
            warmup_steps: section.warmup_steps,
            decay_start: section.warmup_steps + after_warmup - decay_steps,
            decay_steps,
            decay: section.decay(),
            min_lr_factor: section.min_lr_factor,
        }
    }

    /// The learning rate of a step, counted from 0.
    pub fn lr(&self, step: u64) -> f64 {
        self.peak_lr * self.factor(step)
    }

    /// The learning rate of a step as a fraction of the peak.
    pub fn factor(&self, step: u64) -> f64 {
        if step < self.warmup_steps {
            return (step + 1) as f64 / self.warmup_steps as f64;
        }
        let left = match self.decay {
            DecayType::Constant => return 1.0,
            DecayType::Linear => 1.0 - self.progress(step),
            DecayType::Cosine => 0.5 * (1.0 + (PI * self.progress(step)).cos()),
        };
        self.min_lr_factor + (1.0 - self.min_lr_factor) * left
    }

    /// The completed fraction of the decay, from 0 to 1.
    fn progress(&self, step: u64) -> f64 {
        let decayed = step.saturating_sub(self.decay_start).min(self.decay_steps);
        match self.decay_steps {
            0 => 0.0,
            steps => decayed as f64 / steps as f64,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn schedule(text: &str) -> Schedule {
        Schedule::from_config(&Config::parse(text, &[]).unwrap(), 64)
    }

    fn factors(schedule: &Schedule, steps: u64) -> Vec<f64> {
        (0..steps).map(|step| schedule.factor(step)).collect()
    }

    #[test]
    fn warms_up_stays_constant_and_decays() {
        let schedule = schedule(
            "[training]\nsteps = 10\n[lr_scheduler]\nwarmup_steps = 2\ndecay_ratio = 0.4\nmin_lr_factor = 0.2\n",
        );
        let expected = [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2];
        for (found, expected) in factors(&schedule, 12).iter().zip(expected) {
            assert!((found - expected).abs() < 1e-12, "{found} != {expected}");
        }
    }

    #[test]
    fn decay_starts_after_the_warm_up_by_default() {
        let schedule = schedule(
            "[training]\nsteps = 8\n[lr_scheduler]\nwarmup_steps = 4\ndecay_type = \"cosine\"\n",
        );
        assert_eq!((schedule.decay_start, schedule.decay_steps), (4, 4));
        assert_eq!(schedule.factor(3), 1.0);
        assert_eq!(schedule.factor(4), 1.0);
        assert!((schedule.factor(6) - 0.5).abs() < 1e-12);
        assert!(schedule.factor(8).abs() < 1e-12);
    }

    #[test]
    fn the_rate_scales_with_the_global_batch() {
        let schedule =
            schedule("[optimizer]\nlr = 0.1\n[lr_scheduler]\nlinear_scaling_base_batch = 16\n");
        assert_eq!(schedule.lr(0), 0.4);
    }

    prop_compose! {
        fn any_schedule()(
            steps in 1u64..200, warmup in 0u64..250, ratio in proptest::option::of(0.0f64..=1.0),
            cosine: bool, constant: bool, min in 0.0f64..=1.0,
        ) -> (Schedule, u64) {
            let mut config = Config::default();
            config.training.steps = steps;
            config.lr_scheduler.warmup_steps = warmup;
            config.lr_scheduler.decay_ratio = ratio;
            config.lr_scheduler.min_lr_factor = min;
            config.lr_scheduler.decay_type = match (constant, cosine) {
                (true, _) => None,
                (_, true) => Some(DecayType::Cosine),
                (_, false) => Some(DecayType::Linear),
            };
            (Schedule::from_config(&config, 1), steps)
        }
    }

    proptest! {
        #[test]
        fn stays_within_its_bounds((schedule, steps) in any_schedule()) {
            for (step, factor) in factors(&schedule, steps + 10).into_iter().enumerate() {
                prop_assert!((0.0..=1.0).contains(&factor));
                if step as u64 >= schedule.warmup_steps {
                    prop_assert!(factor >= schedule.min_lr_factor - 1e-12);
                } else {
                    prop_assert!(factor > 0.0);
                }
            }
        }

        #[test]
        fn increases_during_warm_up_only((schedule, steps) in any_schedule()) {
            let factors = factors(&schedule, steps + 10);
            for (step, pair) in factors.windows(2).enumerate() {
                if (step as u64) + 1 < schedule.warmup_steps {
                    prop_assert!(pair[0] < pair[1]);
                } else {
                    prop_assert!(pair[0] >= pair[1]);
                }
            }
        }

        #[test]
        fn has_no_jumps((schedule, steps) in any_schedule()) {
            // The steepest decay is the middle of the cosine.
            let steepest = PI / 2.0 / schedule.decay_steps.max(1) as f64 + 1e-12;
            let warmup = schedule.warmup_steps as usize;
            for pair in factors(&schedule, steps + 10).windows(2).skip(warmup.saturating_sub(1)) {
                prop_assert!(pair[0] - pair[1] <= steepest);
            }
            if warmup > 0 {
                prop_assert_eq!(schedule.factor(warmup as u64 - 1), 1.0);
            }
            prop_assert_eq!(schedule.factor(schedule.decay_start.max(schedule.warmup_steps)), 1.0);
        }

        #[test]
        fn survives_a_checkpoint((schedule, steps) in any_schedule()) {
            let text = serde_json::to_string(&schedule).unwrap();
            let read: Schedule = serde_json::from_str(&text).unwrap();
            for step in 0..steps {
                // The JSON parser may be off by the last bit.
                prop_assert!((read.lr(step) - schedule.lr(step)).abs() <= 1e-15);
            }
        }
    }
}

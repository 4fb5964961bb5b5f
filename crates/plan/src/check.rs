//! Validation of strategies before they are estimated.

use crate::Strategy;
use trainyard_arch::DecoderConfig;

/// Why a strategy is invalid.
#[derive(Debug, Eq, PartialEq, thiserror::Error)]
pub enum StrategyError {
    /// A value out of range.
    #[error("{what} = {value} is out of range: use {least} to {most}")]
    Range {
        /// The setting.
        what: &'static str,
        /// Its value.
        value: usize,
        /// The smallest valid value.
        least: usize,
        /// The largest valid value.
        most: usize,
    },
    /// A number that another must divide.
    #[error("{what} = {value} is not divisible by {by} = {divisor}: change one of them")]
    Uneven {
        /// The setting that must be divisible.
        what: &'static str,
        /// Its value.
        value: usize,
        /// The setting that must divide it.
        by: &'static str,
        /// Its value.
        divisor: usize,
    },
    /// The schedule requires another number of stages per rank.
    #[error("the schedule {schedule} requires {wanted} stages per rank, not {found}")]
    Stages {
        /// The schedule.
        schedule: &'static str,
        /// The number it requires.
        wanted: usize,
        /// The configured number.
        found: usize,
    },
}

/// Within this limit no size computed from a strategy overflows; a larger value is a typo.
const LIMIT: usize = 1 << 30;

impl Strategy {
    /// Checks that the strategy is valid for a model. Every valid strategy can be estimated.
    pub fn check(&self, shape: &DecoderConfig) -> Result<(), StrategyError> {
        self.check_ranges(shape)?;
        let degrees = &self.degrees;
        let over = degrees.dp_shard * degrees.cp * degrees.tp;
        let experts = shape.moe.as_ref().map_or(1, |e| e.num_experts);
        let replicas = degrees.data_parallel() * self.micro_batch;
        let heads = shape.num_attention_heads;
        let samples = "data-parallel ranks x micro_batch";
        for (what, value, by, divisor) in [
            ("num_attention_heads", heads, "tp", degrees.tp),
            ("seq_len", self.seq_len, "cp", degrees.cp),
            ("dp_shard x cp x tp", over, "ep", degrees.ep),
            ("num_experts", experts, "ep", degrees.ep),
            ("global_batch", self.global_batch, samples, replicas),
        ] {
            if !value.is_multiple_of(divisor) {
                return Err(StrategyError::Uneven {
                    what,
                    value,
                    by,
                    divisor,
                });
            }
        }
        let (schedule, found) = (self.pipeline.schedule, self.pipeline.stages_per_rank);
        match schedule.num_chunks() {
            Some(wanted) if wanted != found => Err(StrategyError::Stages {
                schedule: schedule.name(),
                wanted,
                found,
            }),
            _ => Ok(()),
        }
    }

    fn check_ranges(&self, shape: &DecoderConfig) -> Result<(), StrategyError> {
        let degrees = &self.degrees;
        // The embedding and the head may each have a stage of their own.
        let most_stages = shape.num_hidden_layers + 2;
        let num_stages = degrees.pp.saturating_mul(self.pipeline.stages_per_rank);
        let sizes = [
            degrees.dp_outer,
            degrees.dp_replicate,
            degrees.dp_shard,
            degrees.cp,
            degrees.tp,
        ];
        let world = sizes.into_iter().fold(degrees.pp, usize::saturating_mul);
        let tokens = self.global_batch.saturating_mul(self.seq_len);
        for (what, value, least, most) in [
            ("ranks", world, 1, LIMIT),
            ("ep", degrees.ep, 1, LIMIT),
            ("stages", num_stages, 1, most_stages),
            ("zero_stage", self.zero_stage, 0, 3),
            ("micro_batch", self.micro_batch, 1, self.global_batch),
            ("tokens of a step", tokens, 1, 1 << 40),
        ] {
            if value < least || value > most {
                return Err(StrategyError::Range {
                    what,
                    value,
                    least,
                    most,
                });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::strategy::Strategy as _;
    use trainyard_arch::DecoderConfig;
    use trainyard_schedule::ScheduleKind;

    use crate::{
        Calibration, Cluster, Degrees, Offload, Overheads, PipelineLayout, Precision, Recompute,
        Software, Strategy, Synchronization, memory, time,
    };

    fn any() -> impl proptest::strategy::Strategy<Value = Strategy> {
        let size = || prop::sample::select(vec![0usize, 1, 1, 1, 2, 2, 3, 4]);
        let degrees = (size(), size(), size(), size(), size(), Just(1usize));
        let kinds = prop::sample::select(ScheduleKind::ALL.to_vec());
        let batch = (
            prop::sample::select(vec![0usize, 7, 16, 64]),
            size(),
            0usize..64,
        );
        let rest = (kinds, size(), 0usize..5);
        (degrees, batch, rest).prop_map(|(degrees, batch, (schedule, stages_per_rank, zero))| {
            let (pp, dp_replicate, dp_shard, cp, tp, ep) = degrees;
            Strategy {
                degrees: Degrees {
                    dp_outer: 1,
                    pp,
                    dp_replicate,
                    dp_shard,
                    cp,
                    tp,
                    ep,
                },
                zero_stage: zero,
                sequence_parallel: tp > 1,
                pipeline: PipelineLayout {
                    schedule,
                    stages_per_rank,
                },
                global_batch: batch.0,
                micro_batch: batch.1,
                seq_len: 32 * batch.2,
                recompute: Recompute::None,
                offload: Offload::None,
                precision: Precision::BF16,
                synchronization: Synchronization::PLAIN,
                split_points: Vec::new(),
            }
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]

        #[test]
        fn every_valid_strategy_can_be_estimated(strategy in any()) {
            let shape = DecoderConfig::gpt(8, 256, 8, 1024, 2048);
            if strategy.check(&shape).is_err() {
                return Ok(());
            }
            let cluster: Cluster = "64xH100".parse().unwrap();
            let calibration = Calibration::of(&cluster.accelerator, Software::MODERN);
            let seconds = time(&shape, &strategy, &cluster, &calibration).likely;
            prop_assert!(seconds.is_finite() && seconds > 0.0);
            let all = memory(&shape, &strategy, &calibration.software, &Overheads::default());
            prop_assert!(all.iter().all(|m| m.total().is_finite() && m.total() > 0.0));
        }
    }

    #[test]
    fn errors_name_the_invalid_setting() {
        let shape = DecoderConfig::gpt(8, 256, 8, 1024, 2048);
        let fine = Strategy {
            degrees: Degrees {
                pp: 2,
                dp_shard: 2,
                tp: 2,
                ..Degrees::ONE
            },
            zero_stage: 1,
            sequence_parallel: true,
            pipeline: PipelineLayout {
                schedule: ScheduleKind::OneForwardOneBackward,
                stages_per_rank: 1,
            },
            global_batch: 8,
            micro_batch: 1,
            seq_len: 64,
            recompute: Recompute::None,
            offload: Offload::None,
            precision: Precision::BF16,
            synchronization: Synchronization::PLAIN,
            split_points: Vec::new(),
        };
        assert_eq!(fine.check(&shape), Ok(()));
        let error = |change: fn(&mut Strategy)| {
            let mut changed = fine.clone();
            change(&mut changed);
            changed.check(&shape).unwrap_err().to_string()
        };
        assert!(error(|s| s.degrees.tp = 3).contains("num_attention_heads = 8"));
        assert!(error(|s| s.degrees.pp = 0).contains("ranks = 0"));
        assert!(error(|s| s.degrees.pp = 64).contains("use 1 to 10"));
        assert!(error(|s| s.micro_batch = 3).contains("global_batch = 8"));
        assert!(error(|s| s.zero_stage = 4).contains("zero_stage = 4"));
        assert!(error(|s| s.pipeline.stages_per_rank = 2).contains("1f1b"));
        assert!(error(|s| s.seq_len = usize::MAX).contains("tokens"));
    }
}

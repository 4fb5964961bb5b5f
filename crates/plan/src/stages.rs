//! How transformer blocks are divided into pipeline stages.

use std::ops::Range;

use trainyard_arch::DecoderConfig;
use trainyard_cost::{TooManyStages, partition_balanced};
use trainyard_schedule::ScheduleKind;

use crate::Strategy;

/// Classes of pipeline ranks with the same contents.
#[derive(Copy, Clone, Debug, Eq, Hash, PartialEq)]
pub enum RankClass {
    /// Every rank, without pipeline parallelism.
    Only,
    /// The first rank, with the embedding and the most micro-batches in flight.
    First,
    /// An inner rank: the one with the most micro-batches in flight.
    Middle,
    /// The last rank, with the output head and the loss.
    Last,
}

impl RankClass {
    /// The name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            RankClass::Only => "every rank",
            RankClass::First => "first stage",
            RankClass::Middle => "middle stage",
            RankClass::Last => "last stage",
        }
    }
}

/// The layers that one pipeline rank holds.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct RankLayers {
    /// The class of the rank.
    pub class: RankClass,
    /// The rank's position in the pipeline.
    pub rank: usize,
    /// Number of dense blocks.
    pub num_dense: usize,
    /// Number of blocks with experts.
    pub num_sparse: usize,
    /// Number of blocks in its largest stage.
    pub largest_stage: usize,
    /// Whether the rank holds the embedding.
    pub has_embedding: bool,
    /// Whether the rank holds the output head.
    pub has_head: bool,
}

impl RankLayers {
    /// Number of blocks of both kinds.
    pub const fn num_blocks(&self) -> usize {
        self.num_dense + self.num_sparse
    }
}

/// The number of blocks of stage `stage`. If the blocks do not divide evenly, the first and last stages, which also
/// hold the embedding and the head, get one block fewer, or else the first stages get one more.
pub fn blocks_of_stage(num_blocks: usize, num_stages: usize, stage: usize) -> usize {
    let is_end = stage == 0 || stage + 1 == num_stages;
    if num_stages > 2 && (num_blocks + 2).is_multiple_of(num_stages) {
        let each = (num_blocks + 2) / num_stages;
        return if is_end { each - 1 } else { each };
    }
    num_blocks / num_stages + usize::from(stage < num_blocks % num_stages)
}

/// The number of blocks before a stage.
pub fn blocks_before(num_blocks: usize, num_stages: usize, stage: usize) -> usize {
    if num_stages > 2 && (num_blocks + 2).is_multiple_of(num_stages) {
        let each = (num_blocks + 2) / num_stages;
        return (each * stage).saturating_sub(usize::from(stage > 0));
    }
    num_blocks / num_stages * stage + stage.min(num_blocks % num_stages)
}

impl Strategy {
    /// Stages of the whole pipeline.
    pub const fn num_stages(&self) -> usize {
        self.degrees.pp * self.pipeline.stages_per_rank
    }

    /// The blocks of stage `stage` of a model with `num_blocks` blocks.
    pub fn blocks_of(&self, num_blocks: usize, stage: usize) -> Range<usize> {
        let num_stages = self.num_stages();
        if self.split_points.is_empty() {
            let begin = blocks_before(num_blocks, num_stages, stage);
            return begin..begin + blocks_of_stage(num_blocks, num_stages, stage);
        }
        let point = |stage: usize| self.split_points.get(stage).copied();
        let begin = stage.checked_sub(1).map_or(Some(0), point);
        let (begin, end) = (
            begin.unwrap_or(num_blocks),
            point(stage).unwrap_or(num_blocks),
        );
        begin.min(num_blocks)..end.min(num_blocks)
    }

    /// The split points that the trainer chooses by itself: the slowest stage is as fast as possible.
    pub fn balanced_split_points(
        &self,
        shape: &DecoderConfig,
    ) -> Result<Vec<usize>, TooManyStages> {
        let stages = partition_balanced(&shape.unit_costs(self.seq_len), self.num_stages())?;
        // The embedding is the first unit.
        let starts = stages.into_iter().skip(1);
        Ok(starts.map(|stage| stage.start.saturating_sub(1)).collect())
    }

    /// The stage that a rank holds as its `chunk`-th.
    pub const fn stage_at(&self, rank: usize, chunk: usize) -> usize {
        let pp = self.degrees.pp;
        match self.pipeline.schedule {
            ScheduleKind::ZeroBubbleV | ScheduleKind::DualPipeV if chunk == 1 => 2 * pp - 1 - rank,
            _ => chunk * pp + rank,
        }
    }

    /// The layers of one representative rank of every class.
    pub fn layers_by_class(&self, shape: &DecoderConfig) -> Vec<RankLayers> {
        let pp = self.degrees.pp;
        let classes: &[(RankClass, usize)] = match pp {
            1 => &[(RankClass::Only, 0)],
            2 => &[(RankClass::First, 0), (RankClass::Last, 1)],
            _ => &[
                (RankClass::First, 0),
                (RankClass::Middle, 1),
                (RankClass::Last, pp - 1),
            ],
        };
        let classes = classes.iter();
        classes
            .map(|&(class, rank)| self.layers_of_rank(shape, class, rank))
            .collect()
    }

    /// The numbers of dense blocks and of blocks with experts of a stage.
    pub(crate) fn layers_of_stage(&self, shape: &DecoderConfig, stage: usize) -> (usize, usize) {
        let blocks = self.blocks_of(shape.num_hidden_layers, stage);
        let first_sparse = shape.num_dense_layers();
        let dense = first_sparse.clamp(blocks.start, blocks.end) - blocks.start;
        (dense, blocks.len() - dense)
    }

    fn layers_of_rank(&self, shape: &DecoderConfig, class: RankClass, rank: usize) -> RankLayers {
        let num_stages = self.num_stages();
        let mut rank_layers = RankLayers {
            class,
            rank,
            num_dense: 0,
            num_sparse: 0,
            largest_stage: 0,
            has_embedding: false,
            has_head: false,
        };
        for chunk in 0..self.pipeline.stages_per_rank {
            let stage = self.stage_at(rank, chunk);
            let (dense, sparse) = self.layers_of_stage(shape, stage);
            rank_layers.num_dense += dense;
            rank_layers.num_sparse += sparse;
            rank_layers.largest_stage = rank_layers.largest_stage.max(dense + sparse);
            rank_layers.has_embedding |= stage == 0;
            rank_layers.has_head |= stage + 1 == num_stages;
        }
        rank_layers
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_block_is_in_exactly_one_stage(num_blocks in 1usize..200, num_stages in 1usize..64) {
            prop_assume!(num_blocks >= num_stages);
            let mut before = 0;
            for stage in 0..num_stages {
                prop_assert_eq!(blocks_before(num_blocks, num_stages, stage), before);
                before += blocks_of_stage(num_blocks, num_stages, stage);
            }
            prop_assert_eq!(before, num_blocks);
        }
    }

    #[test]
    fn llama_3_has_one_block_fewer_on_the_first_and_last_stage() {
        let counts: Vec<usize> = (0..128).map(|s| blocks_of_stage(126, 128, s)).collect();
        assert_eq!((counts[0], counts[1], counts[127]), (0, 1, 0));
    }
}

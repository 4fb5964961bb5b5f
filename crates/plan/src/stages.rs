//! Which blocks lie on which rank of a pipeline.

use trainyard_schedule::Kind;

use crate::{Shape, Strategy};

/// Ranks of a pipeline that hold alike things.
#[derive(Copy, Clone, Debug, Eq, Hash, PartialEq)]
pub enum RankClass {
    /// All there is, without a pipeline.
    Only,
    /// The first: with the embedding and the most micro-batches in flight.
    First,
    /// Any other; of those the one with the most in flight.
    Middle,
    /// The last: with the head and the loss.
    Last,
}

impl RankClass {
    /// What reports call it.
    pub const fn name(self) -> &'static str {
        match self {
            RankClass::Only => "every rank",
            RankClass::First => "first stage",
            RankClass::Middle => "middle stage",
            RankClass::Last => "last stage",
        }
    }
}

/// What a rank of a pipeline holds.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Holding {
    /// Which ranks these are.
    pub class: RankClass,
    /// The place of the one that is looked at.
    pub rank: usize,
    /// Blocks without experts.
    pub num_dense: usize,
    /// Blocks with experts.
    pub num_sparse: usize,
    /// Blocks of its largest stage.
    pub largest_stage: usize,
    /// Whether it has the embedding.
    pub has_embedding: bool,
    /// Whether it has the head.
    pub has_head: bool,
}

impl Holding {
    /// Blocks of both kinds.
    pub const fn num_blocks(&self) -> usize {
        self.num_dense + self.num_sparse
    }
}

/// How many blocks stage `stage` has. What does not divide evenly leaves one fewer at both ends, where
/// embedding and head are, or one more at the front.
pub fn blocks_of_stage(num_blocks: usize, num_stages: usize, stage: usize) -> usize {
    let is_end = stage == 0 || stage + 1 == num_stages;
    if num_stages > 2 && (num_blocks + 2).is_multiple_of(num_stages) {
        let each = (num_blocks + 2) / num_stages;
        return if is_end { each - 1 } else { each };
    }
    num_blocks / num_stages + usize::from(stage < num_blocks % num_stages)
}

/// The blocks before that stage.
pub(crate) fn blocks_before(num_blocks: usize, num_stages: usize, stage: usize) -> usize {
    if num_stages > 2 && (num_blocks + 2).is_multiple_of(num_stages) {
        let each = (num_blocks + 2) / num_stages;
        return (each * stage).saturating_sub(usize::from(stage > 0));
    }
    num_blocks / num_stages * stage + stage.min(num_blocks % num_stages)
}

impl Strategy {
    /// Stages of the whole pipeline.
    pub const fn num_stages(&self) -> usize {
        self.degrees.pp * self.layers.stages_per_rank
    }

    /// The stage that is the `chunk`-th of a rank.
    pub const fn stage_at(&self, rank: usize, chunk: usize) -> usize {
        let pp = self.degrees.pp;
        match self.layers.schedule {
            Kind::ZeroBubbleV | Kind::DualPipeV if chunk == 1 => 2 * pp - 1 - rank,
            _ => chunk * pp + rank,
        }
    }

    /// One rank of every class there is.
    pub fn holdings(&self, shape: &Shape) -> Vec<Holding> {
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
            .map(|&(class, rank)| self.holding(shape, class, rank))
            .collect()
    }

    fn holding(&self, shape: &Shape, class: RankClass, rank: usize) -> Holding {
        let num_stages = self.num_stages();
        let num_blocks = shape.num_hidden_layers;
        let first_sparse = num_blocks - shape.num_expert_layers();
        let mut holding = Holding {
            class,
            rank,
            num_dense: 0,
            num_sparse: 0,
            largest_stage: 0,
            has_embedding: false,
            has_head: false,
        };
        for chunk in 0..self.layers.stages_per_rank {
            let stage = self.stage_at(rank, chunk);
            let begin = blocks_before(num_blocks, num_stages, stage);
            let count = blocks_of_stage(num_blocks, num_stages, stage);
            let dense = first_sparse.clamp(begin, begin + count) - begin;
            holding.num_dense += dense;
            holding.num_sparse += count - dense;
            holding.largest_stage = holding.largest_stage.max(count);
            holding.has_embedding |= stage == 0;
            holding.has_head |= stage + 1 == num_stages;
        }
        holding
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_block_lies_in_one_stage(num_blocks in 1usize..200, num_stages in 1usize..64) {
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
    fn llama_3_leaves_one_block_fewer_at_both_ends() {
        let counts: Vec<usize> = (0..128).map(|s| blocks_of_stage(126, 128, s)).collect();
        assert_eq!((counts[0], counts[1], counts[127]), (0, 1, 0));
    }
}

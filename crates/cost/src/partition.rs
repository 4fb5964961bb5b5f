//! Partition of a model's units into pipeline stages.

use std::ops::Range;

/// More stages than units.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "{num_units} units cannot be partitioned into {num_stages} pipeline stages; use fewer stages or a deeper model"
)]
pub struct TooManyStages {
    /// The stages.
    pub num_stages: usize,
    /// The units.
    pub num_units: usize,
}

/// Partitions units of the given costs into `num_stages` consecutive ranges such that the maximum cost of a stage
/// is minimal; of several such partitions, the one that fills earlier stages.
pub fn partition_balanced(
    costs: &[f64],
    num_stages: usize,
) -> Result<Vec<Range<usize>>, TooManyStages> {
    if num_stages == 0 || num_stages > costs.len() {
        return Err(TooManyStages {
            num_stages,
            num_units: costs.len(),
        });
    }
    let mut sums = vec![0.0; costs.len() + 1];
    for (index, cost) in costs.iter().enumerate() {
        sums[index + 1] = sums[index] + cost.max(0.0);
    }
    // The minimal maximum cost of the first `end` units in `stage` stages, and the start of the last stage.
    let mut best = vec![vec![(f64::INFINITY, 0); costs.len() + 1]; num_stages + 1];
    best[0][0] = (0.0, 0);
    for stage in 1..=num_stages {
        for end in stage..=costs.len() {
            for start in stage - 1..end {
                let worst = best[stage - 1][start].0.max(sums[end] - sums[start]);
                // On a tie the later start wins: the stages before hold more.
                if worst <= best[stage][end].0 {
                    best[stage][end] = (worst, start);
                }
            }
        }
    }
    let mut stages = Vec::with_capacity(num_stages);
    let mut end = costs.len();
    for stage in (1..=num_stages).rev() {
        let start = best[stage][end].1;
        stages.push(start..end);
        end = start;
    }
    stages.reverse();
    Ok(stages)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn worst(costs: &[f64], stages: &[Range<usize>]) -> f64 {
        let cost = |stage: &Range<usize>| costs[stage.clone()].iter().sum::<f64>();
        stages.iter().map(cost).fold(0.0, f64::max)
    }

    #[test]
    fn equal_units_are_partitioned_evenly() {
        assert_eq!(
            partition_balanced(&[1.0; 6], 3).unwrap(),
            [0..2, 2..4, 4..6]
        );
        assert_eq!(partition_balanced(&[1.0; 5], 2).unwrap(), [0..3, 3..5]);
        assert!(partition_balanced(&[1.0; 2], 3).is_err());
    }

    proptest! {
        #[test]
        fn the_partition_covers_all_units_and_is_optimal(
            costs in prop::collection::vec(0u8..9, 1..9),
            num_stages in 1usize..5,
        ) {
            let costs: Vec<f64> = costs.into_iter().map(f64::from).collect();
            prop_assume!(num_stages <= costs.len());
            let stages = partition_balanced(&costs, num_stages).unwrap();
            prop_assert_eq!(stages.len(), num_stages);
            prop_assert!(stages.iter().all(|stage| !stage.is_empty()));
            prop_assert_eq!((stages[0].start, stages[num_stages - 1].end), (0, costs.len()));
            prop_assert!(stages.windows(2).all(|pair| pair[0].end == pair[1].start));
            // All possible partitions.
            let found = worst(&costs, &stages);
            for cuts in 0u32..1 << (costs.len() - 1) {
                if cuts.count_ones() as usize + 1 != num_stages {
                    continue;
                }
                let mut starts: Vec<usize> = vec![0];
                starts.extend((1..costs.len()).filter(|cut| cuts & (1 << (cut - 1)) != 0));
                starts.push(costs.len());
                let other: Vec<_> = starts.windows(2).map(|pair| pair[0]..pair[1]).collect();
                prop_assert!(found <= worst(&costs, &other) + 1e-12);
            }
        }
    }
}

//! Constants from measured runs.
//!
//! Least squares on the logarithm of each run's predicted over measured time, so that a run that is twice
//! too fast counts as one that is twice too slow. Every constant is held to what was likely before, by its
//! doubt: runs move only what they speak about, and a constant that no run touches stays where it was. Runs
//! that are far off count less than their square, because some were disturbed.

use crate::constants::NUM_CONSTANTS;
use crate::{Calibration, Cluster, Constants, Shape, Software, Strategy, time};

/// A run that was measured.
#[derive(Clone, Debug)]
pub struct Run<'a> {
    /// The model.
    pub shape: Shape,
    /// How it was split.
    pub strategy: Strategy,
    /// On which machines.
    pub cluster: &'a Cluster,
    /// By which program.
    pub software: Software,
    /// Seconds of a step.
    pub seconds: f64,
}

impl Run<'_> {
    /// Seconds that the constants predict.
    pub fn predicted(&self, constants: &Constants) -> f64 {
        let calibration = Calibration {
            software: self.software,
            constants: *constants,
            spread: 0.0,
            source: String::new(),
        };
        time(&self.shape, &self.strategy, self.cluster, &calibration).likely
    }

    /// Predicted over measured, less one.
    pub fn error(&self, constants: &Constants) -> f64 {
        self.predicted(constants) / self.seconds - 1.0
    }
}

/// How far off a run may be before it counts less than its square.
const USUAL: f64 = 0.06;

/// Rounds at most; it takes about ten.
const ROUNDS: usize = 40;

type Point = [f64; NUM_CONSTANTS];
type Square = [[f64; NUM_CONSTANTS]; NUM_CONSTANTS];

/// The constants that explain the runs, begun at `before` and held to it by `doubts` (in powers of e).
pub fn fit(runs: &[Run<'_>], before: &Constants, doubts: &[f64; NUM_CONSTANTS]) -> Constants {
    let errors = |constants: &Constants| {
        let runs = runs.iter();
        let ratios = runs.map(|run| run.predicted(constants) / run.seconds);
        ratios.map(f64::ln).collect()
    };
    fit_to(&errors, before, doubts)
}

/// The same for anything that was measured: `errors` are logarithms of predicted over measured.
pub(crate) fn fit_to(
    errors: &dyn Fn(&Constants) -> Vec<f64>,
    before: &Constants,
    doubts: &[f64; NUM_CONSTANTS],
) -> Constants {
    let origin = before.to_array().map(f64::ln);
    let problem = Problem {
        errors,
        origin,
        doubts,
    };
    let mut here = origin;
    let mut cost = problem.cost(&here);
    let mut damping = 1e-3;
    for _ in 0..ROUNDS {
        let (mut curvature, mut slope) = problem.linear(&here);
        hold(&here, &mut curvature, &mut slope);
        let Some((there, lower)) = step(&problem, &here, cost, &curvature, &slope, &mut damping)
        else {
            break;
        };
        let gained = cost - lower;
        (here, cost) = (there, lower);
        if gained < 1e-6 * cost {
            break;
        }
    }
    Constants::from_array(here.map(f64::exp))
}

struct Problem<'a> {
    errors: &'a dyn Fn(&Constants) -> Vec<f64>,
    origin: Point,
    doubts: &'a Point,
}

impl Problem<'_> {
    fn residuals(&self, point: &Point) -> Vec<f64> {
        let constants = Constants::from_array(point.map(f64::exp));
        let errors = (self.errors)(&constants).into_iter();
        errors.map(|error| error / USUAL).collect()
    }

    fn cost(&self, point: &Point) -> f64 {
        let far: f64 = self.residuals(point).into_iter().map(soft).sum();
        far + self.prior(point)
    }

    fn prior(&self, point: &Point) -> f64 {
        let each = point.iter().zip(&self.origin).zip(self.doubts);
        each.map(|((x, o), doubt)| ((x - o) / doubt).powi(2)).sum()
    }

    /// Curvature and slope of the cost here, each run by its weight.
    fn linear(&self, point: &Point) -> (Square, Point) {
        const NUDGE: f64 = 1e-4;
        let here = self.residuals(point);
        let sides: Vec<Vec<f64>> = (0..NUM_CONSTANTS)
            .map(|index| {
                let mut moved = *point;
                moved[index] += NUDGE;
                self.residuals(&moved)
            })
            .collect();
        let mut curvature = [[0.0; NUM_CONSTANTS]; NUM_CONSTANTS];
        let mut slope = [0.0; NUM_CONSTANTS];
        for (run, &residual) in here.iter().enumerate() {
            let weight = 1.0 / (1.0 + residual * residual).sqrt();
            let row: Point = std::array::from_fn(|i| (sides[i][run] - residual) / NUDGE);
            for (i, a) in row.iter().enumerate() {
                slope[i] += weight * a * residual;
                for (j, b) in row.iter().enumerate() {
                    curvature[i][j] += weight * a * b;
                }
            }
        }
        for i in 0..NUM_CONSTANTS {
            let hold = 1.0 / (self.doubts[i] * self.doubts[i]);
            curvature[i][i] += hold;
            slope[i] += hold * (point[i] - self.origin[i]);
        }
        (curvature, slope)
    }
}

/// Leaves alone what is at the most it can be and would be more.
fn hold(here: &Point, curvature: &mut Square, slope: &mut Point) {
    let most = Constants::most();
    for i in 0..NUM_CONSTANTS {
        if here[i] < most[i].ln() || slope[i] >= 0.0 {
            continue;
        }
        slope[i] = 0.0;
        curvature[i] = [0.0; NUM_CONSTANTS];
        curvature.iter_mut().for_each(|row| row[i] = 0.0);
        curvature[i][i] = 1.0;
    }
}

/// Squares near zero, straight far away.
fn soft(residual: f64) -> f64 {
    2.0 * ((1.0 + residual * residual).sqrt() - 1.0)
}

/// The first step that lowers the cost, shorter and shorter; none where no step does.
fn step(
    problem: &Problem<'_>,
    here: &Point,
    cost: f64,
    curvature: &Square,
    slope: &Point,
    damping: &mut f64,
) -> Option<(Point, f64)> {
    for _ in 0..12 {
        let mut damped = *curvature;
        for (i, row) in damped.iter_mut().enumerate() {
            row[i] *= 1.0 + *damping;
        }
        let moves = solve(damped, *slope)?;
        let most = Constants::most();
        let there: Point = std::array::from_fn(|i| {
            let moved = here[i] - moves[i].clamp(-1.0, 1.0);
            moved.min(most[i].ln())
        });
        let lower = problem.cost(&there);
        if lower < cost {
            *damping = (*damping * 0.3).max(1e-9);
            return Some((there, lower));
        }
        *damping *= 4.0;
    }
    None
}

/// Solves a symmetric positive system by elimination; none where it is singular.
fn solve(mut matrix: Square, mut right: Point) -> Option<Point> {
    for pivot in 0..NUM_CONSTANTS {
        let head = matrix[pivot][pivot];
        if !(head.is_finite() && head > 0.0) {
            return None;
        }
        let pivot_row = matrix[pivot];
        for row in pivot + 1..NUM_CONSTANTS {
            let factor = matrix[row][pivot] / head;
            for (entry, above) in matrix[row].iter_mut().zip(pivot_row).skip(pivot) {
                *entry -= factor * above;
            }
            right[row] -= factor * right[pivot];
        }
    }
    for row in (0..NUM_CONSTANTS).rev() {
        let known: f64 = (row + 1..NUM_CONSTANTS)
            .map(|c| matrix[row][c] * right[c])
            .sum();
        right[row] = (right[row] - known) / matrix[row][row];
    }
    Some(right)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Degrees, Layers, Offload, Precision, Recompute};

    /// Runs that the constants themselves predict.
    fn runs<'a>(cluster: &'a Cluster, truth: &Constants) -> Vec<Run<'a>> {
        let mut found = Vec::new();
        for (hidden, tp) in [(1024, 1), (2048, 2), (4096, 4), (4096, 8)] {
            for micro_batch in [1, 2, 4, 8] {
                let mut run = Run {
                    shape: Shape::gpt(24, hidden, 16, 51_200, 1024),
                    strategy: Strategy {
                        degrees: Degrees {
                            tp,
                            dp_shard: 8 / tp,
                            ..Degrees::ONE
                        },
                        zero_stage: 0,
                        sequence_parallel: false,
                        layers: Layers {
                            schedule: trainyard_schedule::Kind::OneForwardOneBackward,
                            stages_per_rank: 1,
                        },
                        global_batch: 64,
                        micro_batch,
                        seq_len: 1024,
                        recompute: Recompute::None,
                        offload: Offload::None,
                        precision: Precision::BF16,
                    },
                    cluster,
                    software: Software::MEGATRON_2021,
                    seconds: 1.0,
                };
                run.seconds = run.predicted(truth);
                found.push(run);
            }
        }
        found
    }

    #[test]
    fn what_made_the_runs_is_found_as_far_as_they_tell() {
        let cluster: Cluster = "8xA100".parse().unwrap();
        let truth = Constants {
            matmul: 0.7,
            host_block: 2e-3,
            ..Constants::likely()
        };
        let runs = runs(&cluster, &truth);
        let found = fit(&runs, &Constants::likely(), &Constants::doubts());
        assert!((found.host_block / truth.host_block - 1.0).abs() < 0.05);
        let far = |constants: &Constants| {
            let errors = runs.iter().map(|run| run.error(constants).abs());
            errors.sum::<f64>() / runs.len() as f64
        };
        let (before, after) = (far(&Constants::likely()), far(&found));
        assert!(after < 0.1 * before, "{before} {after}");
        // No run has a pipeline or leaves its machine.
        assert!((found.network / Constants::likely().network - 1.0).abs() < 1e-9);
        assert_eq!(
            found,
            fit(&runs, &Constants::likely(), &Constants::doubts())
        );
    }

    #[test]
    fn without_runs_nothing_moves_and_no_share_exceeds_all() {
        let likely = Constants::likely();
        let still = fit(&[], &likely, &Constants::doubts()).to_array();
        let moved = still.iter().zip(likely.to_array());
        assert!(moved.into_iter().all(|(a, b)| (a / b - 1.0).abs() < 1e-9));
        let cluster: Cluster = "8xA100".parse().unwrap();
        let mut runs = runs(&cluster, &likely);
        runs.iter_mut().for_each(|run| run.seconds /= 4.0);
        let hurried = fit(&runs, &likely, &Constants::doubts()).to_array();
        let most = Constants::most();
        assert!(
            hurried
                .iter()
                .zip(most)
                .all(|(value, most)| *value <= most + 1e-12)
        );
    }
}

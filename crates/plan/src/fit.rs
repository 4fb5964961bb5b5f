//! Fits the efficiency constants to measured runs.
//!
//! Least squares on the logarithm of predicted over measured step time, so an estimate that is half the measurement
//! counts as much as one that is twice it. A Gaussian prior keeps each constant near its initial value: runs move
//! only the constants they say something about. A robust loss limits the weight of outliers, because some runs were
//! disturbed.

use crate::constants::NUM_CONSTANTS;
use crate::{Calibration, Cluster, Constants, Software, Strategy, time};
use trainyard_arch::DecoderConfig;

/// A measured training run.
#[derive(Clone, Debug)]
pub struct Run<'a> {
    /// The model's shape.
    pub shape: DecoderConfig,
    /// How it was parallelized.
    pub strategy: Strategy,
    /// The cluster it ran on.
    pub cluster: &'a Cluster,
    /// The program that ran it.
    pub software: Software,
    /// Measured seconds of a step.
    pub seconds: f64,
}

impl Run<'_> {
    /// The step time that these constants predict, in seconds.
    pub fn predicted(&self, constants: &Constants) -> f64 {
        let calibration = Calibration {
            software: self.software,
            constants: *constants,
            mean_error: 0.0,
            spread: 0.0,
            source: String::new(),
        };
        time(&self.shape, &self.strategy, self.cluster, &calibration).likely
    }

    /// The relative error: predicted over measured, minus one.
    pub fn error(&self, constants: &Constants) -> f64 {
        self.predicted(constants) / self.seconds - 1.0
    }
}

/// The relative error beyond which the robust loss becomes linear.
const ERROR_SCALE: f64 = 0.06;

/// Iteration limit; about ten suffice.
const MAX_ITERATIONS: usize = 40;

type Point = [f64; NUM_CONSTANTS];
type Matrix = [[f64; NUM_CONSTANTS]; NUM_CONSTANTS];

/// Fits the constants to the runs, starting from `before` with prior standard deviations `prior_stds` (of
/// logarithms).
pub fn fit(runs: &[Run<'_>], before: &Constants, prior_stds: &[f64; NUM_CONSTANTS]) -> Constants {
    let errors = |constants: &Constants| {
        let runs = runs.iter();
        let ratios = runs.map(|run| run.predicted(constants) / run.seconds);
        ratios.map(f64::ln).collect()
    };
    fit_to(&errors, before, prior_stds)
}

/// Fits the constants to any measurements: `errors` returns logarithms of predicted over measured values.
pub fn fit_to(
    errors: &dyn Fn(&Constants) -> Vec<f64>,
    before: &Constants,
    prior_stds: &[f64; NUM_CONSTANTS],
) -> Constants {
    let origin = before.to_array().map(f64::ln);
    let problem = Problem {
        errors,
        origin,
        prior_stds,
    };
    let mut here = origin;
    let mut cost = problem.cost(&here);
    let mut damping = 1e-3;
    for _ in 0..MAX_ITERATIONS {
        let (mut curvature, mut gradient) = problem.normal_equations(&here);
        pin_at_bounds(&here, &mut curvature, &mut gradient);
        let Some((there, lower)) = step(&problem, &here, cost, &curvature, &gradient, &mut damping)
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
    prior_stds: &'a Point,
}

impl Problem<'_> {
    fn residuals(&self, point: &Point) -> Vec<f64> {
        let constants = Constants::from_array(point.map(f64::exp));
        let errors = (self.errors)(&constants).into_iter();
        errors.map(|error| error / ERROR_SCALE).collect()
    }

    fn cost(&self, point: &Point) -> f64 {
        let far: f64 = self.residuals(point).into_iter().map(robust_loss).sum();
        far + self.prior(point)
    }

    fn prior(&self, point: &Point) -> f64 {
        let each = point.iter().zip(&self.origin).zip(self.prior_stds);
        each.map(|((x, o), doubt)| ((x - o) / doubt).powi(2)).sum()
    }

    /// The Gauss-Newton curvature and gradient of the cost, with robust weights.
    fn normal_equations(&self, point: &Point) -> (Matrix, Point) {
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
        let mut gradient = [0.0; NUM_CONSTANTS];
        for (run, &residual) in here.iter().enumerate() {
            let weight = 1.0 / (1.0 + residual * residual).sqrt();
            let row: Point = std::array::from_fn(|i| (sides[i][run] - residual) / NUDGE);
            for (i, a) in row.iter().enumerate() {
                gradient[i] += weight * a * residual;
                for (j, b) in row.iter().enumerate() {
                    curvature[i][j] += weight * a * b;
                }
            }
        }
        for i in 0..NUM_CONSTANTS {
            let precision = 1.0 / (self.prior_stds[i] * self.prior_stds[i]);
            curvature[i][i] += precision;
            gradient[i] += precision * (point[i] - self.origin[i]);
        }
        (curvature, gradient)
    }
}

/// Fixes constants that are at their upper bound and would exceed it.
fn pin_at_bounds(here: &Point, curvature: &mut Matrix, gradient: &mut Point) {
    let upper = Constants::upper_bounds();
    for i in 0..NUM_CONSTANTS {
        if here[i] < upper[i].ln() || gradient[i] >= 0.0 {
            continue;
        }
        gradient[i] = 0.0;
        curvature[i] = [0.0; NUM_CONSTANTS];
        curvature.iter_mut().for_each(|row| row[i] = 0.0);
        curvature[i][i] = 1.0;
    }
}

/// A pseudo-Huber loss: quadratic near zero, linear far away.
fn robust_loss(residual: f64) -> f64 {
    2.0 * ((1.0 + residual * residual).sqrt() - 1.0)
}

/// A damped (Levenberg-Marquardt) step that lowers the cost, or `None` if no damping does.
fn step(
    problem: &Problem<'_>,
    here: &Point,
    cost: f64,
    curvature: &Matrix,
    gradient: &Point,
    damping: &mut f64,
) -> Option<(Point, f64)> {
    for _ in 0..12 {
        let mut damped = *curvature;
        for (i, row) in damped.iter_mut().enumerate() {
            row[i] *= 1.0 + *damping;
        }
        let moves = solve(damped, *gradient)?;
        let upper = Constants::upper_bounds();
        let there: Point = std::array::from_fn(|i| {
            let moved = here[i] - moves[i].clamp(-1.0, 1.0);
            moved.min(upper[i].ln())
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

/// Solves a symmetric positive definite system by elimination; `None` if it is singular.
fn solve(mut matrix: Matrix, mut right: Point) -> Option<Point> {
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
    use crate::{Degrees, Offload, PipelineLayout, Precision, Recompute, Synchronization};

    /// Synthetic runs whose step times the constants predict exactly.
    fn runs<'a>(cluster: &'a Cluster, truth: &Constants) -> Vec<Run<'a>> {
        let mut found = Vec::new();
        for (hidden, tp) in [(1024, 1), (2048, 2), (4096, 4), (4096, 8)] {
            for micro_batch in [1, 2, 4, 8] {
                let mut run = Run {
                    shape: DecoderConfig::gpt(24, hidden, 16, 51_200, 1024),
                    strategy: Strategy {
                        degrees: Degrees {
                            tp,
                            dp_shard: 8 / tp,
                            ..Degrees::ONE
                        },
                        zero_stage: 0,
                        sequence_parallel: false,
                        pipeline: PipelineLayout {
                            schedule: trainyard_schedule::ScheduleKind::OneForwardOneBackward,
                            stages_per_rank: 1,
                        },
                        global_batch: 64,
                        micro_batch,
                        seq_len: 1024,
                        recompute: Recompute::None,
                        offload: Offload::None,
                        precision: Precision::BF16,
                        synchronization: Synchronization::PLAIN,
                        split_points: Vec::new(),
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
    fn a_fit_recovers_the_constants_that_the_runs_determine() {
        let cluster: Cluster = "8xA100".parse().unwrap();
        let truth = Constants {
            matmul: 0.7,
            host_block: 2e-3,
            ..Constants::prior()
        };
        let runs = runs(&cluster, &truth);
        let found = fit(&runs, &Constants::prior(), &Constants::prior_stds());
        assert!((found.host_block / truth.host_block - 1.0).abs() < 0.05);
        let far = |constants: &Constants| {
            let errors = runs.iter().map(|run| run.error(constants).abs());
            errors.sum::<f64>() / runs.len() as f64
        };
        let (before, after) = (far(&Constants::prior()), far(&found));
        assert!(after < 0.1 * before, "{before} {after}");
        // No run uses a pipeline or more than one node.
        assert!((found.network / Constants::prior().network - 1.0).abs() < 1e-9);
        assert_eq!(
            found,
            fit(&runs, &Constants::prior(), &Constants::prior_stds())
        );
    }

    #[test]
    fn without_runs_nothing_moves_and_fractions_stay_below_one() {
        let prior = Constants::prior();
        let still = fit(&[], &prior, &Constants::prior_stds()).to_array();
        let moved = still.iter().zip(prior.to_array());
        assert!(moved.into_iter().all(|(a, b)| (a / b - 1.0).abs() < 1e-9));
        let cluster: Cluster = "8xA100".parse().unwrap();
        let mut runs = runs(&cluster, &prior);
        runs.iter_mut().for_each(|run| run.seconds /= 4.0);
        let hurried = fit(&runs, &prior, &Constants::prior_stds()).to_array();
        let upper = Constants::upper_bounds();
        assert!(
            hurried
                .iter()
                .zip(upper)
                .all(|(value, upper)| *value <= upper + 1e-12)
        );
    }
}

//! Compares two runs: losses, gradient norms and parameters, and communicated bytes with closed formulas.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tch::{Kind, Tensor};
use trainyard_config::{
    Config, Dtype, GradientCompression, LocalUpdateMethod, ParameterCompression,
};

use crate::error::{EngineError, Result};
use crate::verify::rank::{RankReport, parameters_file, report_file};
use crate::verify::served::{ServerReport, WorkerReport, worker_reports};

/// The largest differences that count as equal.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tolerance {
    /// The dtype that the tolerance is for.
    pub name: &'static str,
    /// Relative tolerance of losses.
    pub losses: f64,
    /// Relative tolerance of gradient norms; none if they differ, because gradients are compressed or are of one replica.
    pub grad_norms: Option<f64>,
    /// Tolerance of parameters, relative to the magnitude of the tensor; none if they differ, because gradients arrive late or
    /// replicas take steps of their own.
    pub parameters: Option<f64>,
    /// Whether parameters are compared by their largest element or by their norm.
    pub by_element: bool,
    /// The largest difference of compressed gradients from exact sums.
    pub gradients: Option<f64>,
}

impl Tolerance {
    /// The tolerance for float64 of replicas that take steps of their own with their own gradients.
    pub const FP64_REPLICAS: Tolerance = Tolerance {
        grad_norms: None,
        ..Tolerance::FP64
    };

    /// The tolerance for gradients of earlier parameters, whose order differs from run to run.
    pub const STALE: Tolerance = Tolerance {
        name: "stale gradients",
        losses: 5e-2,
        grad_norms: None,
        parameters: None,
        by_element: false,
        gradients: None,
    };

    /// The tolerance for float64.
    pub const FP64: Tolerance = Tolerance {
        name: "float64",
        losses: 1e-9,
        grad_norms: Some(1e-9),
        parameters: Some(1e-9),
        by_element: true,
        gradients: None,
    };

    /// The tolerance for a dtype, from its rounding errors.
    pub fn of(dtype: Dtype, config: &Config) -> Tolerance {
        if config.local_updates.method != LocalUpdateMethod::None {
            return Tolerance {
                name: "local updates",
                losses: 5e-2,
                grad_norms: None,
                parameters: None,
                by_element: false,
                gradients: None,
            };
        }
        let compression = config.parallelism.gradient_compression;
        let is_quantized = [GradientCompression::Int8, GradientCompression::Fp8]
            .contains(&compression)
            || config.parallelism.parameter_compression != ParameterCompression::None;
        if compression.keeps_errors() || is_quantized {
            return Tolerance {
                name: "compressed",
                losses: 5e-2,
                grad_norms: (!compression.keeps_errors()).then_some(1e-1),
                // AdamW's first updates are as large for small gradients as for large ones, whatever their error.
                parameters: (!compression.keeps_errors()).then_some(3e-1),
                by_element: false,
                gradients: Some(compression.max_difference()),
            };
        }
        let compressed = config.reduce_dtype().size() < dtype.size();
        let gradients = match compression {
            GradientCompression::None => None,
            compression => Some(compression.max_difference()),
        };
        match dtype {
            Dtype::Float64 => Tolerance::FP64,
            Dtype::Float32 if !compressed => Tolerance {
                name: "float32",
                losses: 1e-5,
                grad_norms: Some(1e-5),
                parameters: Some(1e-5),
                by_element: false,
                gradients,
            },
            Dtype::Float32 | Dtype::Bfloat16 | Dtype::Float16 => Tolerance {
                name: "bfloat16",
                losses: 2e-2,
                grad_norms: Some(2e-2),
                parameters: Some(5e-2),
                by_element: false,
                gradients,
            },
        }
    }
}

/// The comparison of two runs in one dtype.
#[derive(Debug, Serialize)]
pub struct Comparison {
    /// The dtype of the runs.
    pub types: &'static str,
    /// One row per compared quantity.
    pub rows: Vec<Row>,
}

/// The comparison of one quantity.
#[derive(Debug, Serialize)]
pub struct Row {
    /// The name of the quantity.
    pub what: String,
    /// The largest difference.
    pub worst: f64,
    /// Where the largest difference is.
    pub at: String,
    /// The tolerance.
    pub allowed: f64,
}

impl Row {
    /// Whether the difference is within the tolerance. NaN is not.
    pub fn passed(&self) -> bool {
        self.worst <= self.allowed
    }
}

impl Comparison {
    /// Whether every row passed.
    pub fn passed(&self) -> bool {
        self.rows.iter().all(Row::passed)
    }
}

/// Compares the results of a run on `num_ranks` ranks, in the directory `strategy`, with those of a run on
/// one rank, in the directory `reference`.
pub fn compare(
    reference: &Path,
    strategy: &Path,
    num_ranks: usize,
    tolerance: Tolerance,
) -> Result<Comparison> {
    let expected: RankReport = report(reference, 0)?;
    let ranks = (0..num_ranks)
        .map(|rank| report(strategy, rank))
        .collect::<Result<Vec<RankReport>>>()?;
    let found = &ranks[0];
    let mut rows = vec![scalars(
        "losses",
        &expected.losses,
        &found.losses,
        tolerance.losses,
    )];
    if let Some(allowed) = tolerance.grad_norms {
        let (expected, found) = (&expected.grad_norms, &found.grad_norms);
        rows.push(scalars("gradient norms", expected, found, allowed));
    }
    if let Some(allowed) = tolerance.gradients {
        rows.extend(compressed_gradients(&ranks, allowed));
    }
    let wanted = parameters(reference, 0)?;
    let first = parameters(strategy, 0)?;
    if let Some(allowed) = tolerance.parameters {
        rows.push(tensors(&wanted, &first, allowed, tolerance.by_element)?);
    }
    rows.push(identical(&first, strategy, num_ranks)?);
    if num_ranks > 1 {
        rows.extend(bytes(&ranks));
    }
    Ok(Comparison {
        types: tolerance.name,
        rows,
    })
}

/// As [`compare`], with the results of parameter servers and their workers.
pub fn compare_served(
    reference: &Path,
    strategy: &Path,
    num_servers: usize,
    tolerance: Tolerance,
) -> Result<Comparison> {
    let expected: RankReport = report(reference, 0)?;
    let found: ServerReport = report(strategy, 0)?;
    let (losses, norms) = (&expected.losses, &expected.grad_norms);
    let mut rows = vec![scalars("losses", losses, &found.losses, tolerance.losses)];
    if let Some(allowed) = tolerance.grad_norms {
        rows.push(scalars("gradient norms", norms, &found.grad_norms, allowed));
    }
    let first = parameters(strategy, 0)?;
    if let Some(allowed) = tolerance.parameters {
        let wanted = parameters(reference, 0)?;
        rows.push(tensors(&wanted, &first, allowed, tolerance.by_element)?);
    }
    rows.push(identical(&first, strategy, num_servers)?);
    let workers = worker_reports(strategy)?;
    let sum = |of: fn(&WorkerReport) -> u64| workers.iter().map(of).sum::<u64>();
    let (pushed, pulled) = (sum(|worker| worker.pushed), sum(|worker| worker.pulled));
    rows.extend([
        exact(
            "gradient bytes pushed, all workers",
            pushed,
            found.pushed_formula,
        ),
        exact(
            "parameter bytes pulled, all workers",
            pulled,
            found.pulled_formula,
        ),
    ]);
    Ok(Comparison {
        types: tolerance.name,
        rows,
    })
}

/// Compares what compressed reductions have sent, and kept, with exact sums; none if the ranks did not measure it.
fn compressed_gradients(ranks: &[RankReport], allowed: f64) -> Option<Row> {
    let measured = ranks.iter().enumerate();
    let differences: Vec<(f64, String)> = measured
        .filter_map(|(rank, report)| Some((report.gradient_difference?, format!("rank {rank}"))))
        .collect();
    let what = "gradients sent and kept";
    (!differences.is_empty()).then(|| worst(what, differences.into_iter(), allowed))
}

/// Compares one value per step by relative difference.
fn scalars(what: &str, expected: &[f64], found: &[f64], allowed: f64) -> Row {
    let differences = expected
        .iter()
        .zip(found)
        .enumerate()
        .map(|(step, (e, f))| {
            (
                (e - f).abs() / e.abs().max(f64::MIN_POSITIVE),
                format!("step {}", step + 1),
            )
        });
    let mut row = worst(what, differences, allowed);
    if expected.len() != found.len() {
        row.worst = f64::INFINITY;
    }
    row
}

type Tensors = BTreeMap<String, Tensor>;

fn tensors(expected: &Tensors, found: &Tensors, allowed: f64, by_element: bool) -> Result<Row> {
    let mut differences = Vec::new();
    for (name, expected) in expected {
        let difference = match found.get(name) {
            Some(found) if found.size() == expected.size() => {
                relative_difference(expected, found, by_element)?
            }
            _ => f64::INFINITY,
        };
        differences.push((difference, name.clone()));
    }
    let what = if by_element {
        "parameters, by largest element"
    } else {
        "parameters, by norm"
    };
    Ok(worst(what, differences.into_iter(), allowed))
}

fn relative_difference(expected: &Tensor, found: &Tensor, by_element: bool) -> Result<f64> {
    let expected = expected.f_to_kind(Kind::Double)?;
    let difference = found.f_to_kind(Kind::Double)?.f_sub(&expected)?;
    let size = |t: &Tensor| -> Result<f64> {
        Ok(if by_element {
            f64::try_from(t.f_abs()?.f_max()?)?
        } else {
            f64::try_from(t.f_norm()?)?
        })
    };
    Ok(size(&difference)? / size(&expected)?.max(f64::MIN_POSITIVE))
}

/// The number of parameters that are not bitwise equal on all ranks.
fn identical(first: &Tensors, strategy: &Path, num_ranks: usize) -> Result<Row> {
    let mut different = 0;
    let mut at = "all ranks".to_owned();
    for rank in 1..num_ranks {
        let other = parameters(strategy, rank)?;
        for (name, tensor) in first {
            if !other.get(name).is_some_and(|o| o.equal(tensor)) {
                different += 1;
                at = format!("rank {rank}, {name}");
            }
        }
    }
    Ok(Row {
        what: "parameters that differ between ranks".to_owned(),
        worst: f64::from(different),
        at,
        allowed: 0.0,
    })
}

/// Compares the bytes that all ranks sent with the formulas (exactly) and with the bytes that were transferred.
fn bytes(ranks: &[RankReport]) -> Vec<Row> {
    let sum = |of: fn(&RankReport) -> u64| ranks.iter().map(of).sum::<u64>();
    let (gradients, parameters) = (sum(|r| r.gradient_sent), sum(|r| r.parameter_sent));
    let (sent, wire) = (sum(|r| r.sent), sum(|r| r.wire_sent));
    let formula = &ranks[0];
    // Pipeline stages have different parameters: sum the formula over stages, once per stage.
    let mut stages: Vec<&RankReport> = ranks.iter().collect();
    stages.sort_by_key(|rank| rank.stage);
    stages.dedup_by_key(|rank| rank.stage);
    let of_stages = |of: fn(&RankReport) -> u64| stages.iter().map(|rank| of(rank)).sum::<u64>();
    let (gradient_formula, parameter_formula) = (
        of_stages(|rank| rank.gradient_formula),
        of_stages(|rank| rank.parameter_formula),
    );
    let mut rows = vec![
        exact(
            "gradient bytes reduced",
            formula.gradient_payload,
            formula.payload_formula,
        ),
        exact(
            "gradient bytes sent, all ranks",
            gradients,
            gradient_formula,
        ),
    ];
    if parameters + parameter_formula > 0 {
        rows.push(exact(
            "parameter bytes sent, all ranks",
            parameters,
            parameter_formula,
        ));
    }
    let outer = sum(|r| r.outer_sent);
    let outer_formula = sum(|r| r.outer_formula) / formula.num_replicas;
    if outer + outer_formula > 0 {
        rows.push(exact(
            "outer gradient bytes sent, all ranks",
            outer,
            outer_formula,
        ));
    }
    let activations = sum(|r| r.activation_sent);
    if let Some(expected) = formula.activation_formula.filter(|f| activations + f > 0) {
        rows.push(exact(
            "activation bytes sent, all ranks",
            activations,
            expected,
        ));
    }
    // Gloo's ring sends two segments to a neighbor in each of 2(n - 1) steps, each with a header. In small jobs, headers
    // are a large part of the bytes.
    let headers = 64 * 4 * (ranks.len() as u64 - 1) * sum(|r| r.num_collectives);
    rows.push(Row {
        what: "ledger against bytes transferred".to_owned(),
        worst: wire.abs_diff(sent) as f64 / sent.max(1) as f64,
        at: format!("{sent} of {wire}"),
        allowed: 0.02 + headers as f64 / sent.max(1) as f64,
    });
    rows
}

/// Compares a number of bytes with a formula.
fn exact(what: &str, found: u64, expected: u64) -> Row {
    Row {
        what: what.to_owned(),
        worst: found.abs_diff(expected) as f64,
        at: format!("{found} of {expected}"),
        allowed: 0.0,
    }
}

fn worst(what: &str, differences: impl Iterator<Item = (f64, String)>, allowed: f64) -> Row {
    let mut row = Row {
        what: what.to_owned(),
        worst: 0.0,
        at: String::new(),
        allowed,
    };
    for (difference, at) in differences {
        // NaN counts as the largest difference, although comparisons with it are false.
        if difference >= row.worst || difference.is_nan() {
            (row.worst, row.at) = (difference, at);
            if difference.is_nan() {
                break;
            }
        }
    }
    row
}

fn report<T: DeserializeOwned>(folder: &Path, rank: usize) -> Result<T> {
    let path = report_file(folder, rank);
    let text = std::fs::read_to_string(&path).map_err(|source| EngineError::Io {
        path: path.clone(),
        source,
    })?;
    serde_json::from_str(&text).map_err(|error| EngineError::Unreadable {
        what: path.display().to_string(),
        reason: error.to_string(),
    })
}

fn parameters(folder: &Path, rank: usize) -> Result<Tensors> {
    Ok(Tensor::read_safetensors(parameters_file(folder, rank))?
        .into_iter()
        .collect())
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<40} {:>10} {:>10}        where",
            self.types, "worst", "allowed"
        )?;
        for row in &self.rows {
            writeln!(
                f,
                "{:<40} {:>10.1e} {:>10.1e}  {:<4}  {}",
                row.what,
                row.worst,
                row.allowed,
                if row.passed() { "ok" } else { "FAIL" },
                row.at
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nan_never_passes() {
        let row = scalars("losses", &[1.0, 2.0], &[1.0, f64::NAN], 1e-5);
        assert!(!row.passed());
        assert_eq!(row.at, "step 2");
    }

    #[test]
    fn a_missing_step_never_passes() {
        assert!(!scalars("losses", &[1.0, 2.0], &[1.0], 1e-5).passed());
    }
}

//! A sweep of matrix products, and the three constants fitted to it.

use super::CalibrateError;

/// One timed matrix product.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct MatmulSample {
    /// Rows of the result.
    pub m: f64,
    /// Columns of the result.
    pub n: f64,
    /// The inner dimension.
    pub k: f64,
    /// Measured seconds.
    pub seconds: f64,
}

/// The fitted constants.
#[derive(Copy, Clone, Debug)]
pub(super) struct Fit {
    /// Fraction of peak that very large products reach.
    pub share: f64,
    /// Elements of the result at which half of it is reached.
    pub area: f64,
    /// Inner dimension at which half of it is reached.
    pub depth: f64,
    /// Mean relative error.
    pub error: f64,
}

const MIN_ROWS: usize = 3;

/// Reads a sweep as CSV with the header `m,n,k,tflops` or `m,n,k,seconds`.
pub fn read_matmuls(file: &str, text: &str) -> Result<Vec<MatmulSample>, CalibrateError> {
    let wrong = |line, found: &str, wanted| CalibrateError::Row {
        file: file.to_owned(),
        line,
        found: found.chars().take(40).collect(),
        wanted,
    };
    let lines = text.lines().enumerate();
    let mut lines = lines.filter(|(_, line)| !line.trim().is_empty() && !line.starts_with('#'));
    const HEADER: &str = "header m,n,k,tflops or m,n,k,seconds";
    let (number, header) = lines.next().ok_or_else(|| wrong(1, "", HEADER))?;
    let names: Vec<&str> = header.split(',').map(str::trim).collect();
    let is_rate = match names.as_slice() {
        ["m", "n", "k", "tflops"] => true,
        ["m", "n", "k", "seconds"] => false,
        _ => return Err(wrong(number + 1, header, HEADER)),
    };
    let mut matmuls = Vec::new();
    for (index, line) in lines {
        let cells: Vec<&str> = line.split(',').map(str::trim).collect();
        let numbers = cells.iter().map(|cell| match cell.parse::<f64>() {
            Ok(value) if value.is_finite() && value > 0.0 => Ok(value),
            _ => Err(wrong(index + 1, cell, "positive number")),
        });
        let numbers = numbers.collect::<Result<Vec<f64>, _>>()?;
        let &[m, n, k, last] = numbers.as_slice() else {
            return Err(wrong(index + 1, line, "row of four numbers"));
        };
        let seconds = if is_rate {
            2.0 * m * n * k / (last * 1e12)
        } else {
            last
        };
        matmuls.push(MatmulSample { m, n, k, seconds });
    }
    if matmuls.len() < MIN_ROWS {
        Err(CalibrateError::Few {
            file: file.to_owned(),
            found: matmuls.len(),
            wanted: MIN_ROWS,
        })
    } else {
        Ok(matmuls)
    }
}

/// Searches area and depth on a grid that is refined around the best point; the fraction follows from them.
pub(super) fn fit(matmuls: &[MatmulSample], peak: f64) -> Result<Fit, CalibrateError> {
    let mut best: Option<(f64, Fit)> = None;
    let (mut area, mut depth, mut step) = (14.0f64, 5.0f64, 1.0f64);
    for _ in 0..6 {
        for i in -6i32..=6 {
            for j in -6i32..=6 {
                let at = (area + step * f64::from(i), depth + step * f64::from(j));
                let (cost, fit) = at_point(matmuls, peak, at.0.exp(), at.1.exp());
                if best.is_none_or(|(least, _)| cost < least) {
                    best = Some((cost, fit));
                }
            }
        }
        if let Some((_, fit)) = best {
            (area, depth) = (fit.area.ln(), fit.depth.ln());
        }
        step /= 3.0;
    }
    let fit = best.map(|(_, fit)| fit);
    fit.filter(|fit| fit.share.is_finite() && fit.share > 0.0)
        .ok_or(CalibrateError::Flat {
            file: "the matmul sweep".to_owned(),
        })
}

fn at_point(matmuls: &[MatmulSample], peak: f64, area: f64, depth: f64) -> (f64, Fit) {
    let ideal = |p: &MatmulSample| {
        let flops = 2.0 * p.m * p.n * p.k;
        flops / peak * (1.0 + area / (p.m * p.n)) * (1.0 + depth / p.k)
    };
    let count = matmuls.len() as f64;
    let logs = matmuls.iter().map(|p| (ideal(p) / p.seconds).ln());
    let share = (logs.sum::<f64>() / count).exp().min(1.0);
    let logs = || matmuls.iter().map(|p| (ideal(p) / share / p.seconds).ln());
    let cost = logs().map(|log| log * log).sum();
    let error = logs().map(f64::abs).sum::<f64>() / count;
    let fit = Fit {
        share,
        area,
        depth,
        error,
    };
    (cost, fit)
}

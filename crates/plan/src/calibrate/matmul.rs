//! A sweep of matrix products, and the three constants that explain it.

use super::CalibrateError;

/// One product that was timed.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Product {
    /// Rows of the result.
    pub m: f64,
    /// Columns of the result.
    pub n: f64,
    /// Depth.
    pub k: f64,
    /// How long it took.
    pub seconds: f64,
}

/// What explains a sweep.
#[derive(Copy, Clone, Debug)]
pub(super) struct Fit {
    /// The share of the peak that very large products reach.
    pub share: f64,
    /// Elements of the result at which half of it is reached.
    pub area: f64,
    /// The same for depth.
    pub depth: f64,
    /// How far off it is on average.
    pub error: f64,
}

const LEAST: usize = 3;

/// Reads lines `m,n,k,tflops` or `m,n,k,seconds`, whichever the first line says.
pub fn read_products(file: &str, text: &str) -> Result<Vec<Product>, CalibrateError> {
    let wrong = |line, what: &str, wanted| CalibrateError::Row {
        file: file.to_owned(),
        line,
        what: what.chars().take(40).collect(),
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
    let mut products = Vec::new();
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
        let seconds = match is_rate {
            true => 2.0 * m * n * k / (last * 1e12),
            false => last,
        };
        products.push(Product { m, n, k, seconds });
    }
    match products.len() < LEAST {
        true => Err(CalibrateError::Few {
            file: file.to_owned(),
            found: products.len(),
            wanted: LEAST,
        }),
        false => Ok(products),
    }
}

/// Tries areas and depths on a grid that is refined around the best; the share follows from them.
pub(super) fn fit(products: &[Product], peak: f64) -> Result<Fit, CalibrateError> {
    let mut best: Option<(f64, Fit)> = None;
    let (mut area, mut depth, mut step) = (14.0f64, 5.0f64, 1.0f64);
    for _ in 0..6 {
        for i in -6i32..=6 {
            for j in -6i32..=6 {
                let at = (area + step * f64::from(i), depth + step * f64::from(j));
                let (cost, fit) = at_point(products, peak, at.0.exp(), at.1.exp());
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
            file: "the sweep".to_owned(),
        })
}

fn at_point(products: &[Product], peak: f64, area: f64, depth: f64) -> (f64, Fit) {
    let ideal = |p: &Product| {
        let flops = 2.0 * p.m * p.n * p.k;
        flops / peak * (1.0 + area / (p.m * p.n)) * (1.0 + depth / p.k)
    };
    let count = products.len() as f64;
    let logs = products.iter().map(|p| (ideal(p) / p.seconds).ln());
    let share = (logs.sum::<f64>() / count).exp().min(1.0);
    let logs = || products.iter().map(|p| (ideal(p) / share / p.seconds).ln());
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

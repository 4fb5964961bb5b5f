//! Measured metrics of a run, from its metrics file or from CSV.

use serde::Deserialize;

/// A run's measured performance.
#[derive(Copy, Clone, Debug, Default, PartialEq)]
pub struct Measured {
    /// Median seconds of a step.
    pub seconds: f64,
    /// Fraction of the step spent waiting for data, if reported.
    pub data_share: Option<f64>,
    /// Peak memory in bytes, if reported.
    pub peak_bytes: Option<f64>,
    /// Tokens per second per rank, if reported.
    pub tokens_per_second: Option<f64>,
    /// Model FLOPs utilization, if reported.
    pub mfu: Option<f64>,
    /// Number of steps of the median.
    pub num_steps: usize,
}

/// Why a run's metrics cannot be read.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum MeasuredError {
    /// An invalid line.
    #[error(
        "line {line}: {reason}; expected a metrics.jsonl, or CSV with the header step_seconds,peak_bytes"
    )]
    Line {
        /// The line number, from 1.
        line: usize,
        /// What is wrong.
        reason: String,
    },
    /// There are no steps.
    #[error("the run has no measured steps: at least one is needed")]
    Empty,
}

/// The metrics that a plan predicts.
#[derive(Deserialize)]
struct Line {
    seconds: Option<f64>,
    data_share: Option<f64>,
    memory_bytes: Option<f64>,
    tps: Option<f64>,
    mfu: Option<f64>,
}

impl Measured {
    /// Reads a job's `metrics.jsonl`, or CSV with a column `step_seconds` and optionally `peak_bytes`. The first
    /// reported step counts as warm-up and is skipped if there are others.
    pub fn read(text: &str) -> Result<Measured, MeasuredError> {
        let mut lines = if text.trim_start().starts_with('{') {
            json_lines(text)?
        } else {
            csv_lines(text)?
        };
        if lines.len() > 1 {
            lines.remove(0);
        }
        let num_steps = lines.len();
        let all = |of: fn(&Line) -> Option<f64>| lines.iter().filter_map(of).collect::<Vec<_>>();
        let seconds = median(all(|line| line.seconds)).ok_or(MeasuredError::Empty)?;
        let peaks = all(|line| line.memory_bytes).into_iter();
        Ok(Measured {
            seconds,
            data_share: median(all(|line| line.data_share)),
            peak_bytes: peaks.reduce(f64::max).filter(|bytes| *bytes > 0.0),
            tokens_per_second: median(all(|line| line.tps)),
            mfu: median(all(|line| line.mfu)),
            num_steps,
        })
    }
}

fn json_lines(text: &str) -> Result<Vec<Line>, MeasuredError> {
    let lines = text.lines().enumerate();
    let lines = lines.filter(|(_, line)| !line.trim().is_empty());
    let lines = lines.map(|(index, line)| {
        let line: Result<Line, _> = serde_json::from_str(line);
        let line = line.map_err(|error| invalid(index, &error.to_string()))?;
        check(index, line)
    });
    let mut lines: Vec<Line> = lines.collect::<Result<_, _>>()?;
    // Evaluations have a line too.
    lines.retain(|line| line.seconds.is_some());
    Ok(lines)
}

fn csv_lines(text: &str) -> Result<Vec<Line>, MeasuredError> {
    let lines = text.lines().enumerate();
    let mut lines = lines.filter(|(_, line)| !line.trim().is_empty() && !line.starts_with('#'));
    let (index, header) = lines.next().ok_or(MeasuredError::Empty)?;
    let names: Vec<&str> = header.split(',').map(str::trim).collect();
    let seconds = names.iter().position(|name| *name == "step_seconds");
    let seconds = seconds.ok_or_else(|| invalid(index, "no column step_seconds"))?;
    let peak = names.iter().position(|name| *name == "peak_bytes");
    let lines = lines.map(|(index, line)| {
        let cells: Vec<&str> = line.split(',').map(str::trim).collect();
        let number = |column: usize| {
            let cell = cells.get(column).copied().unwrap_or("");
            let number: Result<f64, _> = cell.parse();
            number.map_err(|_| invalid(index, &format!("{cell:?} is not a number")))
        };
        let line = Line {
            seconds: Some(number(seconds)?),
            data_share: None,
            memory_bytes: peak.map(number).transpose()?,
            tps: None,
            mfu: None,
        };
        check(index, line)
    });
    lines.collect()
}

fn check(index: usize, line: Line) -> Result<Line, MeasuredError> {
    let is_time = |seconds: f64| seconds.is_finite() && seconds > 0.0;
    match line.seconds {
        Some(seconds) if !is_time(seconds) => Err(invalid(
            index,
            &format!("{seconds} is not a valid step time"),
        )),
        _ => Ok(line),
    }
}

fn invalid(index: usize, reason: &str) -> MeasuredError {
    MeasuredError::Line {
        line: index + 1,
        reason: reason.to_owned(),
    }
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.retain(|value| value.is_finite());
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_and_csv_are_read() {
        let json = "{\"step\":1,\"seconds\":9.0,\"memory_bytes\":5}\n\
                    {\"step\":2,\"seconds\":2.0,\"memory_bytes\":7,\"mfu\":null,\"tps\":10.0}\n\
                    {\"step\":2,\"validation_loss\":1.5}\n\
                    {\"step\":3,\"seconds\":3.0,\"memory_bytes\":6}\n";
        let measured = Measured::read(json).unwrap();
        assert_eq!((measured.seconds, measured.peak_bytes), (3.0, Some(7.0)));
        let csv = Measured::read("step_seconds,peak_bytes\n2.5,1e10\n").unwrap();
        assert_eq!((csv.seconds, csv.peak_bytes), (2.5, Some(1e10)));
        for wrong in [
            "",
            "{",
            "a,b\n1,2",
            "step_seconds\nx",
            "step_seconds\n-1",
            "{\"seconds\":-1}",
        ] {
            assert!(Measured::read(wrong).is_err(), "{wrong}");
        }
    }
}

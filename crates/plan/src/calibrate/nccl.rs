//! Parses the tables of nccl-tests.
//!
//! Columns are located by the header, because they moved between versions: before 2.13 there is no `root`, and
//! newer versions can add per-iteration columns or timestamps. Launchers may prefix every line with the rank, and
//! NCCL prints log lines between the rows.

use std::collections::{BTreeMap, BTreeSet};

use super::CalibrateError;

/// The measured collective.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum Collective {
    /// `all_reduce_perf`.
    AllReduce,
    /// `all_gather_perf`.
    AllGather,
    /// `reduce_scatter_perf`.
    ReduceScatter,
    /// `alltoall_perf`.
    AllToAll,
    /// `sendrecv_perf`.
    SendReceive,
}

const NAMES: [(&str, Collective); 6] = [
    ("all_reduce", Collective::AllReduce),
    ("all_gather", Collective::AllGather),
    ("reduce_scatter", Collective::ReduceScatter),
    ("alltoall", Collective::AllToAll),
    ("all_to_all", Collective::AllToAll),
    ("sendrecv", Collective::SendReceive),
];

/// One table: seconds by size.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    /// The file it was read from.
    pub file: String,
    /// The measured collective.
    pub collective: Collective,
    /// Number of ranks.
    pub num_ranks: usize,
    /// Number of nodes.
    pub num_nodes: usize,
    /// Size in bytes as nccl-tests counts it, and seconds.
    pub rows: Vec<(f64, f64)>,
}

/// A fitted line: seconds are `latency + wire bytes / bytes_per_second`.
#[derive(Copy, Clone, Debug)]
pub(super) struct LinearFit {
    pub latency: f64,
    pub bytes_per_second: f64,
    /// Mean relative error of the fit.
    pub error: f64,
}

/// Rows required for a fit.
const MIN_ROWS: usize = 3;

/// The largest plausible number of ranks.
const MAX_RANKS: usize = 1 << 20;

/// Parses all tables of a text. `file` appears in errors and may name the collective.
pub fn read_tables(file: &str, text: &str) -> Result<Vec<Table>, CalibrateError> {
    let mut reader = Reader {
        file,
        ..Reader::default()
    };
    for (index, line) in text.lines().enumerate() {
        reader.line(index + 1, line.trim())?;
    }
    reader.close()?;
    if reader.tables.is_empty() {
        Err(CalibrateError::NoTable {
            file: file.to_owned(),
        })
    } else {
        Ok(reader.tables)
    }
}

/// The ranks of a group and their hosts.
#[derive(Default)]
struct Members {
    ranks: BTreeSet<usize>,
    hosts: BTreeSet<String>,
}

#[derive(Default)]
struct Reader<'a> {
    file: &'a str,
    collective: Option<Collective>,
    /// The ranks by group: all groups run at the same time, independently.
    groups: BTreeMap<String, Members>,
    /// Number of GPUs of a single process, used if no ranks are listed.
    num_gpus: Option<usize>,
    /// Columns of `time` in a row: out-of-place and in-place.
    times: Vec<usize>,
    rows: Vec<(f64, f64)>,
    tables: Vec<Table>,
}

impl Reader<'_> {
    fn line(&mut self, number: usize, line: &str) -> Result<(), CalibrateError> {
        let line = untagged(line);
        let named = NAMES.iter().find(|(name, _)| line.contains(name));
        let is_row = is_row(line);
        if let (Some((_, collective)), false) = (named, is_row) {
            self.close()?;
            self.collective = Some(*collective);
        }
        if let Some(comment) = line.strip_prefix('#') {
            return self.comment(comment);
        }
        // Launchers and libraries print between the rows.
        if !is_row {
            return Ok(());
        }
        self.row(number, line)
    }

    fn comment(&mut self, comment: &str) -> Result<(), CalibrateError> {
        let words: Vec<&str> = comment.split_whitespace().collect();
        match words.as_slice() {
            ["Rank", rank, rest @ ..] => self.member(rank, rest),
            ["nThread", threads, "nGpus", gpus, ..] => {
                // Every run starts with this line.
                self.close()?;
                let product = threads
                    .parse::<usize>()
                    .ok()
                    .zip(gpus.parse::<usize>().ok());
                self.num_gpus = product.and_then(|(a, b)| a.checked_mul(b));
            }
            ["size", ..] => {
                let columns = words.iter().enumerate();
                let times = columns.filter(|(_, word)| ["time", "cputime"].contains(*word));
                self.times = times.map(|(column, _)| column).collect();
            }
            _ => {}
        }
        Ok(())
    }

    /// `# Rank 0 Group 0 Pid 1234 on host device 0 ...`; older versions print no group.
    fn member(&mut self, rank: &str, rest: &[&str]) {
        let after = |name: &str| {
            let column = rest.iter().position(|word| *word == name)?;
            rest.get(column + 1)
        };
        let group = after("Group").copied().unwrap_or("0").to_owned();
        let rank = rank.trim_end_matches(':').parse();
        let members = self.groups.entry(group).or_default();
        let has_room = members.ranks.len() < MAX_RANKS;
        if let (Ok(rank), Some(host), true) = (rank, after("on"), has_room) {
            members.ranks.insert(rank);
            members.hosts.insert((*host).to_owned());
        }
    }

    fn row(&mut self, number: usize, line: &str) -> Result<(), CalibrateError> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let wrong = |found: &str, wanted| CalibrateError::Row {
            file: self.file.to_owned(),
            line: number,
            found: found.chars().take(40).collect(),
            wanted,
        };
        let number_at = |column: usize, wanted| {
            let word = words.get(column).copied();
            let word = word.ok_or_else(|| wrong(line, "complete row: size to #wrong, twice"))?;
            match word.parse::<f64>() {
                Ok(value) if value.is_finite() && value >= 0.0 => Ok(value),
                _ => Err(wrong(word, wanted)),
            }
        };
        let bytes = number_at(0, "number of bytes")?;
        let times = match self.times.as_slice() {
            [] => &[5, 9],
            times => times,
        };
        // If only one of out-of-place and in-place was measured, the other is blank.
        let is_half = times.len() == 2 && times[1] == words.len();
        let times = if is_half { &times[..1] } else { times };
        let mut rows = Vec::with_capacity(times.len());
        for &column in times {
            let microseconds = number_at(column, "time in microseconds")?;
            if microseconds > 0.0 && bytes > 0.0 {
                rows.push((bytes, microseconds * 1e-6));
            }
        }
        self.rows.extend(rows);
        Ok(())
    }

    /// Finishes the current table.
    fn close(&mut self) -> Result<(), CalibrateError> {
        if self.rows.is_empty() {
            return Ok(());
        }
        let file = self.file.to_owned();
        let by_name = NAMES.iter().find(|(name, _)| file.contains(name));
        let by_name = by_name.map(|(_, collective)| *collective);
        let Some(collective) = self.collective.or(by_name) else {
            return Err(CalibrateError::NoCollective { file });
        };
        let groups = std::mem::take(&mut self.groups);
        let members = groups.into_values().next().unwrap_or_default();
        let num_ranks = match members.ranks.len() {
            0 => self.num_gpus.unwrap_or(0),
            listed => listed,
        };
        if !(2..=MAX_RANKS).contains(&num_ranks) {
            return Err(CalibrateError::NoRanks { file });
        }
        self.tables.push(Table {
            file,
            collective,
            num_ranks,
            num_nodes: members.hosts.len().max(1),
            rows: std::mem::take(&mut self.rows),
        });
        self.times.clear();
        Ok(())
    }
}

/// Removes the rank that a launcher prepends: `[1,0]<stdout>:` or `0:`.
fn untagged(line: &str) -> &str {
    let tagged = line
        .strip_prefix('[')
        .and_then(|rest| rest.split_once(">:"));
    if let Some((_, rest)) = tagged {
        return rest.trim_start();
    }
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    match line.split_once(':') {
        Some((rank, rest)) if is_number(rank) && rest.starts_with([' ', '#']) => rest.trim_start(),
        _ => line,
    }
}

/// Whether a line is a table row: it starts with a number of bytes. Some host names start with digits too, but
/// contain other characters.
fn is_row(line: &str) -> bool {
    let first = line.split_whitespace().next().unwrap_or("");
    first.starts_with(|c: char| c.is_ascii_digit()) && !first.contains([':', '@', '/'])
}

impl Table {
    /// Bytes on the wire per byte of size, as nccl-tests defines bus bandwidth.
    fn factor(&self) -> f64 {
        let ranks = self.num_ranks as f64;
        match self.collective {
            Collective::AllReduce => 2.0 * (ranks - 1.0) / ranks,
            Collective::SendReceive => 1.0,
            _ => (ranks - 1.0) / ranks,
        }
    }

    /// The least-squares line of relative errors, with a non-negative latency.
    pub(super) fn line(&self) -> Result<LinearFit, CalibrateError> {
        if self.rows.len() < MIN_ROWS {
            return Err(CalibrateError::Few {
                file: self.file.clone(),
                found: self.rows.len(),
                wanted: MIN_ROWS,
            });
        }
        let factor = self.factor();
        // Each row divided by its time: u latency + v slope = 1.
        let (mut uu, mut uv, mut vv, mut u1, mut v1) = (0.0, 0.0, 0.0, 0.0, 0.0);
        for (bytes, seconds) in &self.rows {
            let (u, v) = (1.0 / seconds, factor * bytes / seconds);
            uu += u * u;
            uv += u * v;
            vv += v * v;
            u1 += u;
            v1 += v;
        }
        let determinant = uu * vv - uv * uv;
        let mut latency = (u1 * vv - v1 * uv) / determinant;
        let mut slope = (v1 * uu - u1 * uv) / determinant;
        if !(latency.is_finite() && latency > 0.0) {
            (latency, slope) = (0.0, v1 / vv);
        }
        if !(slope.is_finite() && slope > 0.0) {
            return Err(CalibrateError::Flat {
                file: self.file.clone(),
            });
        }
        let error = |(bytes, seconds): &(f64, f64)| {
            ((latency + slope * factor * bytes) / seconds - 1.0).abs()
        };
        let errors: f64 = self.rows.iter().map(error).sum();
        Ok(LinearFit {
            latency,
            bytes_per_second: 1.0 / slope,
            error: errors / self.rows.len() as f64,
        })
    }

    pub(super) fn note(&self, line: &LinearFit) -> String {
        format!(
            "{} ({:?}, {} ranks on {} nodes): {:.1} GB/s, {:.1} us, mean error {:.1} %",
            self.file,
            self.collective,
            self.num_ranks,
            self.num_nodes,
            line.bytes_per_second / 1e9,
            line.latency * 1e6,
            100.0 * line.error
        )
    }
}

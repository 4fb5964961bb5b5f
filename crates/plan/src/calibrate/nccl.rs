//! The tables that nccl-tests print.
//!
//! Columns are found by the header above them, because they moved: versions before 2.13 have no root, newer
//! ones can report each iteration or the time of day. Launchers put the rank before every line, and NCCL talks
//! between them.

use std::collections::{BTreeMap, BTreeSet};

use super::CalibrateError;

/// What was measured.
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

/// One table: seconds by bytes on the wire.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    /// Where it was read.
    pub file: String,
    /// Which collective.
    pub collective: Collective,
    /// How many ranks took part.
    pub num_ranks: usize,
    /// On how many machines.
    pub num_machines: usize,
    /// Bytes as nccl-tests count them, and seconds.
    pub rows: Vec<(f64, f64)>,
}

/// Seconds are `latency + wire bytes / bytes_per_second`.
#[derive(Copy, Clone, Debug)]
pub(super) struct Line {
    pub latency: f64,
    pub bytes_per_second: f64,
    /// How far off the line is on average, as a share.
    pub error: f64,
}

/// Rows that a line needs.
const LEAST_ROWS: usize = 3;

/// Ranks beyond this are a slip.
const MOST_RANKS: usize = 1 << 20;

/// All tables of a text; `file` names it in messages and may name the collective.
pub fn read_tables(file: &str, text: &str) -> Result<Vec<Table>, CalibrateError> {
    let mut reader = Reader {
        file,
        ..Reader::default()
    };
    for (index, line) in text.lines().enumerate() {
        reader.line(index + 1, line.trim())?;
    }
    reader.close()?;
    match reader.tables.is_empty() {
        true => Err(CalibrateError::NoTable {
            file: file.to_owned(),
        }),
        false => Ok(reader.tables),
    }
}

/// Ranks, and the machines that have them.
#[derive(Default)]
struct Members {
    ranks: BTreeSet<usize>,
    hosts: BTreeSet<String>,
}

#[derive(Default)]
struct Reader<'a> {
    file: &'a str,
    collective: Option<Collective>,
    /// Who takes part, by group: all groups run at the same time, each for itself.
    groups: BTreeMap<String, Members>,
    /// What one process was started with, where no ranks are listed.
    started: Option<usize>,
    /// Places of `time` in a row: out of place, in place.
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
        // Launchers and libraries talk between rows.
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
                // Where each run begins.
                self.close()?;
                let product = threads
                    .parse::<usize>()
                    .ok()
                    .zip(gpus.parse::<usize>().ok());
                self.started = product.and_then(|(a, b)| a.checked_mul(b));
            }
            ["size", ..] => {
                let places = words.iter().enumerate();
                let times = places.filter(|(_, word)| ["time", "cputime"].contains(*word));
                self.times = times.map(|(place, _)| place).collect();
            }
            _ => {}
        }
        Ok(())
    }

    /// `# Rank 0 Group 0 Pid 1234 on host device 0 ...`; older versions print no group.
    fn member(&mut self, rank: &str, rest: &[&str]) {
        let after = |name: &str| {
            let place = rest.iter().position(|word| *word == name)?;
            rest.get(place + 1)
        };
        let group = after("Group").copied().unwrap_or("0").to_owned();
        let rank = rank.trim_end_matches(':').parse();
        let members = self.groups.entry(group).or_default();
        let has_room = members.ranks.len() < MOST_RANKS;
        if let (Ok(rank), Some(host), true) = (rank, after("on"), has_room) {
            members.ranks.insert(rank);
            members.hosts.insert((*host).to_owned());
        }
    }

    fn row(&mut self, number: usize, line: &str) -> Result<(), CalibrateError> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let wrong = |what: &str, wanted| CalibrateError::Row {
            file: self.file.to_owned(),
            line: number,
            what: what.chars().take(40).collect(),
            wanted,
        };
        let number_at = |place: usize, wanted| {
            let word = words.get(place).copied();
            let word = word.ok_or_else(|| wrong(line, "whole row: size to #wrong, twice"))?;
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
        // Where only one half was measured, the other is left blank.
        let is_half = times.len() == 2 && times[1] == words.len();
        let times = if is_half { &times[..1] } else { times };
        let mut rows = Vec::with_capacity(times.len());
        for &place in times {
            let microseconds = number_at(place, "time in microseconds")?;
            if microseconds > 0.0 && bytes > 0.0 {
                rows.push((bytes, microseconds * 1e-6));
            }
        }
        self.rows.extend(rows);
        Ok(())
    }

    /// Ends the table that was being read.
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
            0 => self.started.unwrap_or(0),
            listed => listed,
        };
        if !(2..=MOST_RANKS).contains(&num_ranks) {
            return Err(CalibrateError::NoRanks { file });
        }
        self.tables.push(Table {
            file,
            collective,
            num_ranks,
            num_machines: members.hosts.len().max(1),
            rows: std::mem::take(&mut self.rows),
        });
        self.times.clear();
        Ok(())
    }
}

/// The line without the rank that a launcher puts before it: `[1,0]<stdout>:` or `0:`.
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

/// Rows begin with a number of bytes. So do the names of some hosts, but there is more to them.
fn is_row(line: &str) -> bool {
    let first = line.split_whitespace().next().unwrap_or("");
    first.starts_with(|c: char| c.is_ascii_digit()) && !first.contains([':', '@', '/'])
}

impl Table {
    /// Bytes on the wire per byte, as nccl-tests define bus bandwidth.
    fn factor(&self) -> f64 {
        let ranks = self.num_ranks as f64;
        match self.collective {
            Collective::AllReduce => 2.0 * (ranks - 1.0) / ranks,
            Collective::SendReceive => 1.0,
            _ => (ranks - 1.0) / ranks,
        }
    }

    /// The line of least relative error. Its latency is not below zero.
    pub(super) fn line(&self) -> Result<Line, CalibrateError> {
        if self.rows.len() < LEAST_ROWS {
            return Err(CalibrateError::Few {
                file: self.file.clone(),
                found: self.rows.len(),
                wanted: LEAST_ROWS,
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
        Ok(Line {
            latency,
            bytes_per_second: 1.0 / slope,
            error: errors / self.rows.len() as f64,
        })
    }

    pub(super) fn note(&self, line: &Line) -> String {
        format!(
            "{} ({:?}, {} ranks on {} machines): {:.1} GB/s, {:.1} us, {:.1} % off on average",
            self.file,
            self.collective,
            self.num_ranks,
            self.num_machines,
            line.bytes_per_second / 1e9,
            line.latency * 1e6,
            100.0 * line.error
        )
    }
}

//! The results of the ranks, case by case, and the report made of them.
//!
//! Every rank writes one line per case into its own file. If a rank dies, its last case has no line.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// How one case ended on one rank.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Line {
    pub case: String,
    /// Milliseconds since 1970 at the end of the case: the first to fail is the one to look at.
    pub ended_ms: u64,
    pub seconds: f64,
    /// The reason of a failure.
    pub failure: Option<String>,
    /// What the case measured.
    pub notes: Vec<String>,
}

/// The result file of this rank.
pub(crate) struct Record(File);

impl Record {
    pub(crate) fn create(folder: &Path, rank: usize) -> io::Result<Record> {
        File::create(file(folder, rank)).map(Record)
    }

    pub(crate) fn write(&mut self, line: &Line) -> io::Result<()> {
        let mut text = serde_json::to_string(line)?;
        text.push('\n');
        self.0.write_all(text.as_bytes())
    }
}

/// The failures of a suite, in the order in which they happened; `None` if every rank passed every case. `ends`
/// describes how the process of each rank ended.
pub(crate) fn failures(folder: &Path, cases: &[&str], ends: &[String]) -> Option<String> {
    let mut failed: Vec<(u64, String)> = Vec::new();
    for (rank, end) in ends.iter().enumerate() {
        let lines = read(folder, rank);
        for line in &lines {
            if let Some(reason) = &line.failure {
                let text = format!("{} failed on rank {rank}: {reason}", line.case);
                failed.push((line.ended_ms, text));
            }
        }
        if let Some(case) = cases.get(lines.len()) {
            failed.push((
                u64::MAX,
                format!("{case}: rank {rank} did not finish: {end}"),
            ));
        }
    }
    failed.sort();
    let mut text = String::new();
    for (_, each) in &failed {
        let _ = writeln!(text, "{each}");
    }
    (!failed.is_empty()).then_some(text)
}

/// Every case with its time on the slowest rank and the notes of rank 0.
pub(crate) fn times(folder: &Path, num_ranks: usize) -> String {
    let ranks: Vec<Vec<Line>> = (0..num_ranks).map(|rank| read(folder, rank)).collect();
    let mut text = String::new();
    for (index, line) in ranks.first().into_iter().flatten().enumerate() {
        let of_rank = |lines: &Vec<Line>| lines.get(index).map_or(0.0, |line| line.seconds);
        let slowest = ranks.iter().map(of_rank).fold(0.0, f64::max);
        let _ = writeln!(text, "  {slowest:7.3} s  {}", line.case);
        for note in &line.notes {
            let _ = writeln!(text, "             {note}");
        }
    }
    text
}

fn read(folder: &Path, rank: usize) -> Vec<Line> {
    let text = fs::read_to_string(file(folder, rank)).unwrap_or_default();
    text.lines()
        .filter_map(|line| serde_json::from_str(line).ok())
        .collect()
}

fn file(folder: &Path, rank: usize) -> PathBuf {
    folder.join(format!("rank{rank}.jsonl"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(case: &str, ended_ms: u64, failure: Option<&str>) -> Line {
        Line {
            case: case.to_owned(),
            ended_ms,
            seconds: 0.5,
            failure: failure.map(str::to_owned),
            notes: vec![format!("{case} was seen")],
        }
    }

    #[test]
    fn the_first_failure_is_listed_first_and_a_dead_rank_is_reported() {
        let folder = tempfile::tempdir().unwrap();
        let mut first = Record::create(folder.path(), 0).unwrap();
        first.write(&line("a", 20, Some("peer lost"))).unwrap();
        first.write(&line("b", 30, None)).unwrap();
        let mut second = Record::create(folder.path(), 1).unwrap();
        second.write(&line("a", 10, Some("1 is not 2"))).unwrap();
        let ends = ["exited".to_owned(), "was killed".to_owned()];
        let text = failures(folder.path(), &["a", "b"], &ends).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines,
            [
                "a failed on rank 1: 1 is not 2",
                "a failed on rank 0: peer lost",
                "b: rank 1 did not finish: was killed",
            ]
        );
        assert!(times(folder.path(), 2).contains("0.500 s  b\n             b was seen\n"));
    }

    #[test]
    fn success_has_no_report() {
        let folder = tempfile::tempdir().unwrap();
        let mut record = Record::create(folder.path(), 0).unwrap();
        record.write(&line("a", 1, None)).unwrap();
        assert_eq!(failures(folder.path(), &["a"], &[String::new()]), None);
    }
}

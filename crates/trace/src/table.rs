//! The summary as a table.

use std::fmt;

use crate::{KindSummary, Summary, readable_bytes, readable_time};

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write_ranks(f)?;
        if !self.kinds.is_empty() {
            writeln!(f)?;
            self.write_kinds(f)?;
        }
        self.write_slowest(f)?;
        self.write_findings(f)
    }
}

impl Summary {
    fn write_ranks(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:>5} {:>6} {:>10} {:>10} {:>13} {:>10} {:>10} {:>8}",
            "rank", "steps", "wall", "compute", "communication", "hidden", "exposed", "hidden %"
        )?;
        for rank in &self.ranks {
            writeln!(
                f,
                "{:>5} {:>6} {:>10} {:>10} {:>13} {:>10} {:>10} {:>8}",
                rank.rank,
                rank.num_steps,
                readable_time(rank.wall_ns),
                readable_time(rank.compute_ns),
                readable_time(rank.communication_ns),
                readable_time(rank.hidden_ns),
                readable_time(rank.exposed_ns),
                percent(rank.hidden_ns, rank.communication_ns),
            )?;
        }
        Ok(())
    }

    fn write_findings(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.findings.is_empty() {
            writeln!(f)?;
        }
        self.findings
            .iter()
            .try_for_each(|finding| writeln!(f, "{finding}"))
    }

    fn write_kinds(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<14} {:>8} {:>11} {:>11} {:>13} {:>10} {:>10} {:>8}",
            "all ranks",
            "count",
            "payload",
            "sent",
            "communication",
            "hidden",
            "exposed",
            "hidden %"
        )?;
        for (kind, each) in &self.kinds {
            write_kind(f, kind.name(), each)?;
        }
        Ok(())
    }

    fn write_slowest(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let find = |rank: usize| self.ranks.iter().find(|each| each.rank == rank);
        let Some(slowest) = self.slowest_rank.and_then(find) else {
            return Ok(());
        };
        let mut all: Vec<u64> = self.ranks.iter().map(|each| each.busy_ns).collect();
        all.sort_unstable();
        // The lower of the two middle values, so that the slower of two ranks stands out.
        let median = all[(all.len() - 1) / 2].max(1);
        writeln!(
            f,
            "\nslowest rank: {} (busy {}, {:.2} times the median)",
            slowest.rank,
            readable_time(slowest.busy_ns),
            slowest.busy_ns as f64 / median as f64
        )
    }
}

fn write_kind(f: &mut fmt::Formatter<'_>, name: &str, each: &KindSummary) -> fmt::Result {
    writeln!(
        f,
        "{:<14} {:>8} {:>11} {:>11} {:>13} {:>10} {:>10} {:>8}",
        name,
        each.count,
        readable_bytes(each.payload_bytes),
        readable_bytes(each.sent_bytes),
        readable_time(each.communication_ns),
        readable_time(each.hidden_ns),
        readable_time(each.exposed_ns),
        percent(each.hidden_ns, each.communication_ns),
    )
}

fn percent(value: u64, total: u64) -> String {
    if total == 0 {
        "-".to_owned()
    } else {
        format!("{:.1}", 100.0 * value as f64 / total as f64)
    }
}

//! The best plans as a table for a terminal.

use std::fmt::Write;
use std::io::stdout;

use anstream::{AutoStream, ColorChoice};

use super::{GIB, Report};
use trainyard_plan::{Cluster, Offload, Plan, Sites};

/// Whether the text contains ANSI colors.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub enum Style {
    /// Plain text.
    #[default]
    Plain,
    /// Headings and the best plan are highlighted.
    Colored,
}

impl Style {
    /// Colors on a terminal, unless `NO_COLOR` or `--color` says otherwise.
    pub fn for_stdout() -> Style {
        if AutoStream::choice(&stdout()) != ColorChoice::Never {
            Style::Colored
        } else {
            Style::Plain
        }
    }

    fn paint(self, code: &str, text: &str) -> String {
        match self {
            Style::Plain => text.to_owned(),
            Style::Colored => format!("\x1b[{code}m{text}\x1b[0m"),
        }
    }
}

const HEADINGS: [&str; 10] = [
    "",
    "mesh",
    "schedule",
    "micro-batches",
    "recompute",
    "ZeRO",
    "peak GiB",
    "step s",
    "MFU",
    "tok/s/GPU",
];

impl Report {
    /// The best plans as a table, then the explanation.
    pub fn to_text(&self, most: usize, style: Style) -> String {
        let mut text = format!("{}\n", self.heading());
        if !self.result.plans.is_empty() {
            let _ = write!(text, "\n{}", self.table(most, style));
        }
        for sentence in self.sentences() {
            let _ = write!(text, "\n{}", wrapped(&sentence));
        }
        text.push_str(&self.slow_network_text(style));
        text.push_str(&self.dry_run_text());
        text.push('\n');
        text
    }

    /// The request on one line.
    pub fn heading(&self) -> String {
        let request = &self.request;
        format!(
            "{} ({:.1} B parameters) on {}, global batch {}, sequence length {}",
            request.shape.name,
            request.shape.num_parameters() as f64 / 1e9,
            describe_cluster(&request.cluster),
            request.global_batch,
            request.seq_len
        )
    }

    fn table(&self, most: usize, style: Style) -> String {
        let plans = self.result.plans.iter().take(most).enumerate();
        let rows: Vec<_> = plans.map(|(index, plan)| self.row(index, plan)).collect();
        table(HEADINGS, [1, 2, 4], &rows, style)
    }

    fn row(&self, index: usize, plan: &Plan) -> [String; 10] {
        let strategy = &plan.strategy;
        let schedule = match strategy.degrees.pp {
            1 => "-".to_owned(),
            _ => strategy.pipeline.to_string(),
        };
        let offloaded = match strategy.offload {
            Offload::None => "",
            _ => ", offloaded",
        };
        [
            (index + 1).to_string(),
            strategy.degrees.to_string(),
            schedule,
            format!("{} x {}", strategy.micro_batch, strategy.num_microbatches()),
            strategy.recompute.to_string(),
            format!("{}{offloaded}", strategy.zero_stage),
            format!(
                "{:.1} ({})",
                plan.memory.total() / GIB,
                plan.memory.class.name()
            ),
            format!(
                "{:.2} ({:.2}..{:.2})",
                plan.time.likely, plan.time.low, plan.time.high
            ),
            format!("{:.1} %", 100.0 * self.utilization(plan)),
            format!("{:.0}", self.tokens_per_second(plan)),
        ]
    }
}

/// A table whose first row is highlighted. Columns of text are aligned to the left, numbers to the right.
pub(super) fn table<const N: usize, const T: usize>(
    headings: [&str; N],
    text_columns: [usize; T],
    rows: &[[String; N]],
    style: Style,
) -> String {
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].len());
        cells.chain([headings[column].len()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..N).map(width).collect();
    let line = |cells: &[String]| {
        let mut line = String::new();
        for (column, cell) in cells.iter().enumerate() {
            let width = widths[column];
            let _ = if text_columns.contains(&column) {
                write!(line, "{cell:<width$}  ")
            } else {
                write!(line, "{cell:>width$}  ")
            };
        }
        line.trim_end().to_owned()
    };
    let mut text = style.paint("2", &line(&headings.map(str::to_owned)));
    text.push('\n');
    for (index, row) in rows.iter().enumerate() {
        let line = line(row);
        let line = if index == 0 {
            style.paint("1;32", &line)
        } else {
            line
        };
        let _ = writeln!(text, "{line}");
    }
    text
}

/// A cluster in words, as in `64 H100 (8 nodes x 8 GPUs)`.
pub(super) fn describe_cluster(cluster: &Cluster) -> String {
    let num_nodes = cluster.num_nodes / cluster.num_sites();
    let nodes = if num_nodes == 1 { "node" } else { "nodes" };
    let (sites, network) = match &cluster.sites {
        Some(sites) => (
            format!("{} sites x ", sites.num_sites),
            format!("; {}", describe_sites(sites)),
        ),
        None => (String::new(), String::new()),
    };
    format!(
        "{} {} ({sites}{} {nodes} x {} GPUs{network})",
        cluster.world_size(),
        cluster.accelerator.name,
        num_nodes,
        cluster.gpus_per_node,
    )
}

/// The network between sites in words, as in `10 Gb/s and 30 ms between sites`.
pub(super) fn describe_sites(sites: &Sites) -> String {
    format!(
        "{} Gb/s and {} ms between sites",
        sites.gbit_s(),
        sites.round_trip_ms()
    )
}

/// Wraps a sentence at 100 columns, with continuation lines indented.
pub(super) fn wrapped(sentence: &str) -> String {
    let mut text = String::new();
    let mut room = 100usize;
    for word in sentence.split(' ') {
        if !text.is_empty() && word.len() + 1 > room {
            text.push_str("\n  ");
            room = 98;
        } else if !text.is_empty() {
            text.push(' ');
            room = room.saturating_sub(1);
        }
        text.push_str(word);
        room = room.saturating_sub(word.len());
    }
    text.push('\n');
    text
}

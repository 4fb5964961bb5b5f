//! The best plans as a table for a terminal.

use std::fmt::Write;

use super::{GIB, Report};
use crate::{Offload, Plan};

/// Whether words are coloured: on a terminal they may be, in a file they must not.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub enum Style {
    /// Letters only.
    #[default]
    Plain,
    /// The best and headings stand out.
    Coloured,
}

impl Style {
    fn paint(self, code: &str, text: &str) -> String {
        match self {
            Style::Plain => text.to_owned(),
            Style::Coloured => format!("\x1b[{code}m{text}\x1b[0m"),
        }
    }
}

const HEADINGS: [&str; 10] = [
    "",
    "mesh",
    "schedule",
    "batch",
    "recompute",
    "ZeRO",
    "peak GiB",
    "step s",
    "MFU",
    "tok/s/GPU",
];

impl Report {
    /// The first plans, then why.
    pub fn to_text(&self, most: usize, style: Style) -> String {
        let mut text = format!("{}\n", self.heading());
        if !self.found.plans.is_empty() {
            let _ = write!(text, "\n{}", self.table(most, style));
        }
        for sentence in self.sentences() {
            let _ = write!(text, "\n{}", wrapped(&sentence));
        }
        text.push_str(&self.dry_run_text());
        text.push('\n');
        text
    }

    /// What was asked, in a line.
    pub fn heading(&self) -> String {
        let question = &self.question;
        let cluster = &question.cluster;
        format!(
            "{} ({:.1} B parameters) on {} {} ({} machines of {}), {} samples of {} tokens",
            question.shape.name,
            question.shape.num_parameters() as f64 / 1e9,
            cluster.world_size(),
            cluster.accelerator.name,
            cluster.num_machines,
            cluster.per_machine,
            question.global_batch,
            question.seq_len
        )
    }

    fn table(&self, most: usize, style: Style) -> String {
        let plans = self.found.plans.iter().take(most).enumerate();
        let rows: Vec<[String; 10]> = plans.map(|(place, plan)| self.row(place, plan)).collect();
        let width = |column: usize| {
            let cells = rows.iter().map(|row| row[column].len());
            cells.chain([HEADINGS[column].len()]).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..HEADINGS.len()).map(width).collect();
        let line = |cells: &[String]| {
            let mut line = String::new();
            for (column, cell) in cells.iter().enumerate() {
                let width = widths[column];
                // Words begin, numbers end, where their column does.
                let _ = match column {
                    1 | 2 | 4 => write!(line, "{cell:<width$}  "),
                    _ => write!(line, "{cell:>width$}  "),
                };
            }
            line.trim_end().to_owned()
        };
        let mut text = style.paint("2", &line(&HEADINGS.map(str::to_owned)));
        text.push('\n');
        for (place, row) in rows.iter().enumerate() {
            let line = line(row);
            let line = if place == 0 {
                style.paint("1;32", &line)
            } else {
                line
            };
            let _ = writeln!(text, "{line}");
        }
        text
    }

    fn row(&self, place: usize, plan: &Plan) -> [String; 10] {
        let strategy = &plan.strategy;
        let schedule = match strategy.degrees.pp {
            1 => "-".to_owned(),
            _ => strategy.layers.to_string(),
        };
        let offloaded = match strategy.offload {
            Offload::None => "",
            _ => ", offloaded",
        };
        [
            (place + 1).to_string(),
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

/// A sentence in lines of at most a hundred letters, later ones indented.
fn wrapped(sentence: &str) -> String {
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

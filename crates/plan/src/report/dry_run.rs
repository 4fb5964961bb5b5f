//! The first plans followed by the code that would run them, beside the formulas.
//!
//! Formulas price every way there is; the code is asked about the finalists alone. Tensors are set beside
//! tensors: what a driver or a fragmented memory takes on top is in neither.

use std::fmt::Write;

use serde_json::{Value, json};

use super::{GIB, Report};
use crate::{Overheads, RankClass};

/// One plan, followed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DryRun {
    /// What our own config does not say as the plan meant it; formula and code both count what it says.
    pub losses: Vec<String>,
    /// A line for every kind of rank.
    pub ranks: Vec<RankBytes>,
    /// How unequal the loads of experts were taken to be, zero for equal ones; none without experts.
    pub routing_skew: Option<f64>,
}

/// Bytes of one kind of rank.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct RankBytes {
    /// Which ranks.
    pub class: RankClass,
    /// Parameters and optimiser.
    pub states: Counted,
    /// The most that tensors take at once.
    pub peak: Counted,
}

/// The same bytes, counted twice.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Counted {
    /// By formula.
    pub formula: f64,
    /// By the code.
    pub code: f64,
}

impl Counted {
    /// Code over formula, less one.
    pub fn off(&self) -> f64 {
        self.code / self.formula - 1.0
    }

    fn to_json(self) -> Value {
        json!({ "formula": self.formula, "dry_run": self.code })
    }
}

impl RankBytes {
    /// Bytes that it needs by the code, with what is beside tensors.
    pub fn needed(&self, overheads: &Overheads) -> f64 {
        self.peak.code * (1.0 + overheads.fragmentation.value) + overheads.context.value
    }
}

impl DryRun {
    /// The same of the fullest rank.
    pub fn needed(&self, overheads: &Overheads) -> f64 {
        let needed = self.ranks.iter().map(|rank| rank.needed(overheads));
        needed.fold(0.0, f64::max)
    }

    fn to_json(&self) -> Value {
        let rank = |rank: &RankBytes| {
            json!({
                "class": rank.class.name(),
                "states": rank.states.to_json(),
                "peak": rank.peak.to_json(),
            })
        };
        json!({
            "ranks": self.ranks.iter().map(rank).collect::<Vec<_>>(),
            "losses": self.losses,
            "routing_skew": self.routing_skew,
        })
    }
}

impl Report {
    /// What the code says of the plan at a place, for programs.
    pub(super) fn dry_run_json(&self, place: usize) -> Value {
        match self.dry_runs.get(place) {
            Some(Ok(run)) => run.to_json(),
            Some(Err(why)) => json!({ "error": why }),
            None => Value::Null,
        }
    }

    /// The finalists as a table; nothing where none was followed.
    pub(super) fn dry_run_text(&self) -> String {
        if self.dry_runs.is_empty() {
            return String::new();
        }
        let mut text = format!(
            "\nBy formula and by a dry run of the code, GiB of tensors (states: parameters and optimiser)\n\n\
             {:<4}{:<32}{:<14}{:>15}{:>12}{:>14}{:>12}{:>9}{:>16}\n",
            "",
            "mesh",
            "",
            "states, formula",
            "dry run",
            "peak, formula",
            "dry run",
            "off",
            "with overhead"
        );
        for (place, run) in self.dry_runs.iter().enumerate() {
            let mesh = self.found.plans.get(place);
            let mesh = mesh.map_or(String::new(), |plan| plan.strategy.degrees.to_string());
            match run {
                Ok(run) => self.lines(&mut text, place, &mesh, run),
                Err(why) => {
                    let _ = writeln!(text, "{:<4}{mesh:<32}not followed: {why}", place + 1);
                }
            }
        }
        let mut runs = self.dry_runs.iter().flatten();
        if let Some(skew) = runs.find_map(|run| run.routing_skew) {
            let _ = match skew {
                0.0 => writeln!(
                    text,
                    "\nThe dry run gave every expert as many rows; --routing-skew gives others."
                ),
                _ => writeln!(
                    text,
                    "\nThe dry run gave an expert rows by one over its number to the power {skew}; the formula \
                     gives all as many."
                ),
            };
        }
        text
    }

    /// Whether the code agrees that the finalists fit.
    pub(super) fn verdict(&self) -> Option<String> {
        let room = self.question.cluster.accelerator.memory.value;
        let needed = |run: &Result<DryRun, String>| {
            let run = run.as_ref().ok()?;
            Some(run.needed(&self.question.overheads))
        };
        let first = self.dry_runs.first().and_then(needed)?;
        if first <= room {
            return Some(format!(
                "By a dry run of the code the first plan needs {:.1} GiB and fits.",
                first / GIB
            ));
        }
        let next = self
            .dry_runs
            .iter()
            .position(|run| needed(run).is_some_and(|n| n <= room));
        let next = match next {
            Some(place) => format!("plan {} is the first that fits", place + 1),
            None => "of those that were followed none fits".to_owned(),
        };
        Some(format!(
            "By a dry run of the code the first plan needs {:.1} GiB, {:.1} more than there are; {next}.",
            first / GIB,
            (first - room) / GIB
        ))
    }

    fn lines(&self, text: &mut String, place: usize, mesh: &str, run: &DryRun) {
        let room = self.question.cluster.accelerator.memory.value;
        for (index, rank) in run.ranks.iter().enumerate() {
            let (number, mesh) = match index {
                0 => ((place + 1).to_string(), mesh),
                _ => (String::new(), ""),
            };
            let needed = rank.needed(&self.question.overheads);
            let verdict = if needed > room { "too much" } else { "fits" };
            let _ = writeln!(
                text,
                "{number:<4}{mesh:<32}{:<14}{:>15.3}{:>12.3}{:>14.2}{:>12.2}{:>+8.1}%{:>7.1} {verdict}",
                rank.class.name(),
                rank.states.formula / GIB,
                rank.states.code / GIB,
                rank.peak.formula / GIB,
                rank.peak.code / GIB,
                100.0 * rank.peak.off(),
                needed / GIB
            );
        }
        for loss in &run.losses {
            let _ = writeln!(text, "    followed with a difference: {loss}");
        }
    }
}

//! The best plans checked by a dry run of the training code, compared with the formulas.
//!
//! Formulas estimate every strategy; the dry run checks only the finalists. Both count tensors only, without driver
//! context or fragmentation. Where the dry run measured CUDA's caching allocator, the fragmentation is known.

use std::fmt::Write;

use serde_json::{Value, json};

use super::{GIB, Report};
use trainyard_plan::{Overheads, RankClass};

/// The dry run of one plan.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DryRun {
    /// Settings that a Trainyard config cannot express as planned. The formula and the dry run both use the config.
    pub deviations: Vec<String>,
    /// One entry per class of ranks.
    pub ranks: Vec<RankBytes>,
    /// The routing skew of the experts' load, zero if balanced; `None` without experts.
    pub routing_skew: Option<f64>,
}

/// Memory of one class of ranks.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct RankBytes {
    /// The class of ranks.
    pub class: RankClass,
    /// Parameters and optimizer states.
    pub states: ByteCounts,
    /// Peak memory of all tensors.
    pub peak: ByteCounts,
    /// Peak of what CUDA's caching allocator reserves, if it was measured.
    pub reserved: Option<f64>,
}

/// Bytes by formula and by dry run.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct ByteCounts {
    /// Bytes by formula.
    pub formula: f64,
    /// Bytes by dry run.
    pub dry_run: f64,
}

impl ByteCounts {
    /// The relative difference: dry run over formula, minus one.
    pub fn relative_error(&self) -> f64 {
        self.dry_run / self.formula - 1.0
    }

    fn to_json(self) -> Value {
        json!({ "formula": self.formula, "dry_run": self.dry_run })
    }
}

impl RankBytes {
    /// Peak memory by dry run, with overheads. Fragmentation is measured or assumed.
    pub fn required(&self, overheads: &Overheads) -> f64 {
        let assumed = self.peak.dry_run * (1.0 + overheads.fragmentation.value);
        self.reserved.unwrap_or(assumed) + overheads.context.value
    }
}

impl DryRun {
    /// Whether CUDA's caching allocator was measured.
    fn is_measured(&self) -> bool {
        self.ranks.iter().any(|rank| rank.reserved.is_some())
    }

    /// Peak memory of the class of ranks that needs the most.
    pub fn required(&self, overheads: &Overheads) -> f64 {
        let required = self.ranks.iter().map(|rank| rank.required(overheads));
        required.fold(0.0, f64::max)
    }

    fn to_json(&self) -> Value {
        let rank = |rank: &RankBytes| {
            json!({
                "class": rank.class.name(),
                "states": rank.states.to_json(),
                "peak": rank.peak.to_json(),
                "reserved": rank.reserved,
            })
        };
        json!({
            "ranks": self.ranks.iter().map(rank).collect::<Vec<_>>(),
            "deviations": self.deviations,
            "routing_skew": self.routing_skew,
        })
    }
}

impl Report {
    /// The dry run of the plan at `index` as JSON.
    pub(super) fn dry_run_json(&self, index: usize) -> Value {
        match self.dry_runs.get(index) {
            Some(Ok(run)) => run.to_json(),
            Some(Err(why)) => json!({ "error": why }),
            None => Value::Null,
        }
    }

    /// The dry runs as a table; empty if there are none.
    pub(super) fn dry_run_text(&self) -> String {
        if self.dry_runs.is_empty() {
            return String::new();
        }
        let is_measured = self.dry_runs.iter().flatten().any(DryRun::is_measured);
        let reserved = if is_measured { "reserved" } else { "" };
        let mut text = format!(
            "\nTensor memory by formula and by dry run, in GiB (states: parameters and optimizer)\n\n\
             {:<4}{:<32}{:<14}{:>15}{:>12}{:>14}{:>12}{:>9}{reserved:>10}{:>16}\n",
            "",
            "mesh",
            "",
            "states, formula",
            "dry run",
            "peak, formula",
            "dry run",
            "diff",
            "with overhead"
        );
        for (index, run) in self.dry_runs.iter().enumerate() {
            let mesh = self.result.plans.get(index);
            let mesh = mesh.map_or(String::new(), |plan| plan.strategy.degrees.to_string());
            match run {
                Ok(run) => self.lines(&mut text, index, &mesh, run),
                Err(why) => {
                    let _ = writeln!(text, "{:<4}{mesh:<32}no dry run: {why}", index + 1);
                }
            }
        }
        if is_measured {
            text.push_str(
                "\nreserved: the peak of CUDA's caching allocator, measured on a simulated GPU. It includes fragmentation.\n",
            );
        }
        let mut runs = self.dry_runs.iter().flatten();
        if let Some(skew) = runs.find_map(|run| run.routing_skew) {
            let _ = match skew {
                0.0 => writeln!(
                    text,
                    "\nThe dry run routed tokens evenly to all experts; use --routing-skew for an uneven load."
                ),
                _ => writeln!(
                    text,
                    "\nThe dry run routed tokens with skew {skew} (load proportional to 1 / expert number ^ {skew}); the \
                     formula assumes an even load."
                ),
            };
        }
        text
    }

    /// Whether the dry run confirms that the best plan fits.
    pub(super) fn verdict(&self) -> Option<String> {
        let capacity = self.request.cluster.accelerator.memory.value;
        let required = |run: &Result<DryRun, String>| {
            let run = run.as_ref().ok()?;
            Some(run.required(&self.request.overheads))
        };
        let first = self.dry_runs.first().and_then(required)?;
        if first <= capacity {
            return Some(format!(
                "In a dry run the best plan needs {:.1} GiB per GPU, which fits.",
                first / GIB
            ));
        }
        let next = self
            .dry_runs
            .iter()
            .position(|run| required(run).is_some_and(|n| n <= capacity));
        let next = match next {
            Some(index) => format!("plan {} is the first that fits", index + 1),
            None => "none of the plans in the dry run fits".to_owned(),
        };
        Some(format!(
            "In a dry run the best plan needs {:.1} GiB per GPU, {:.1} GiB more than available; {next}.",
            first / GIB,
            (first - capacity) / GIB
        ))
    }

    fn lines(&self, text: &mut String, plan_index: usize, mesh: &str, run: &DryRun) {
        let capacity = self.request.cluster.accelerator.memory.value;
        for (index, rank) in run.ranks.iter().enumerate() {
            let (number, mesh) = match index {
                0 => ((plan_index + 1).to_string(), mesh),
                _ => (String::new(), ""),
            };
            let required = rank.required(&self.request.overheads);
            let verdict = if required > capacity {
                "too large"
            } else {
                "fits"
            };
            let reserved = rank.reserved.map(|bytes| format!("{:.2}", bytes / GIB));
            let reserved = reserved.unwrap_or_default();
            let _ = writeln!(
                text,
                "{number:<4}{mesh:<32}{:<14}{:>15.3}{:>12.3}{:>14.2}{:>12.2}{:>+8.1}%{reserved:>10}{:>7.1} {verdict}",
                rank.class.name(),
                rank.states.formula / GIB,
                rank.states.dry_run / GIB,
                rank.peak.formula / GIB,
                rank.peak.dry_run / GIB,
                100.0 * rank.peak.relative_error(),
                required / GIB
            );
        }
        for deviation in &run.deviations {
            let _ = writeln!(text, "    deviation from the plan: {deviation}");
        }
    }
}

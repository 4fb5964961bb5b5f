//! The best plans checked by a dry run of the training code, compared with the formulas.
//!
//! Formulas estimate every strategy; the dry run checks only the finalists. Both count tensors only, without driver
//! context or fragmentation. Where the dry run measured CUDA's caching allocator, the fragmentation is known.

use std::fmt::Write;

use serde_json::{Value, json};

use super::{GIB, Report};
use trainyard_plan::{Overheads, Plan, PlanRequest, RankClass, Strategy};

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
    /// The peaks of CUDA's caching allocator, if they were measured.
    pub allocator: Option<AllocatorBytes>,
}

/// Peaks of CUDA's caching allocator on a simulated GPU.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct AllocatorBytes {
    /// Bytes of tensors, rounded as the allocator does.
    pub allocated: f64,
    /// Bytes that the allocator takes from the device.
    pub reserved: f64,
}

impl AllocatorBytes {
    /// What the allocator reserves beyond tensors, as a fraction of their bytes.
    pub fn fragmentation(&self) -> f64 {
        self.reserved / self.allocated - 1.0
    }

    fn to_json(self) -> Value {
        json!({ "allocated": self.allocated, "reserved": self.reserved, "fragmentation": self.fragmentation() })
    }
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
    pub fn required(&self, overheads: &Overheads, strategy: &Strategy) -> f64 {
        let overhead = overheads.of(&strategy.degrees, self.peak.dry_run);
        // The allocator holds the workspaces, too.
        let estimated = self.peak.dry_run + overhead.workspaces + overhead.fragmentation;
        let reserved = self.allocator.map_or(estimated, |found| found.reserved);
        reserved + overhead.context + overhead.communicators
    }
}

impl DryRun {
    /// Whether CUDA's caching allocator was measured.
    fn is_measured(&self) -> bool {
        self.ranks.iter().any(|rank| rank.allocator.is_some())
    }

    /// Peak memory of the class of ranks that needs the most.
    pub fn required(&self, overheads: &Overheads, strategy: &Strategy) -> f64 {
        let required = self
            .ranks
            .iter()
            .map(|rank| rank.required(overheads, strategy));
        required.fold(0.0, f64::max)
    }

    fn to_json(&self) -> Value {
        let rank = |rank: &RankBytes| {
            json!({
                "class": rank.class.name(),
                "states": rank.states.to_json(),
                "peak": rank.peak.to_json(),
                "allocator": rank.allocator.map(AllocatorBytes::to_json),
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
            Some(run) => dry_run_json(run),
            None => Value::Null,
        }
    }

    /// The dry runs as a table; empty if there are none.
    pub(super) fn dry_run_text(&self) -> String {
        let strategies = self.result.plans.iter().map(|plan| &plan.strategy);
        let runs: Vec<_> = strategies.zip(&self.dry_runs).collect();
        dry_run_table(&runs, &self.request)
    }

    /// Whether the dry run confirms that the best plan fits.
    pub(super) fn verdict(&self) -> Option<String> {
        let capacity = self.request.cluster.accelerator.memory.value;
        let required = |(run, plan): (&Result<DryRun, String>, &Plan)| {
            let run = run.as_ref().ok()?;
            Some(run.required(&self.request.overheads, &plan.strategy))
        };
        let runs: Vec<_> = self.dry_runs.iter().zip(&self.result.plans).collect();
        let first = runs.first().copied().and_then(required)?;
        if first <= capacity {
            return Some(format!(
                "In a dry run the best plan needs {:.1} GiB per GPU, which fits.",
                first / GIB
            ));
        }
        let next = runs
            .into_iter()
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
}

/// A dry run as JSON; it may say why there is none.
pub fn dry_run_json(run: &Result<DryRun, String>) -> Value {
    match run {
        Ok(run) => run.to_json(),
        Err(why) => json!({ "error": why }),
    }
}

/// The dry runs of strategies, each with its mesh, as a table; empty if there are none.
pub fn dry_run_table(
    runs: &[(&Strategy, &Result<DryRun, String>)],
    request: &PlanRequest,
) -> String {
    if runs.is_empty() {
        return String::new();
    }
    let found = || runs.iter().filter_map(|(_, run)| run.as_ref().ok());
    let is_measured = found().any(DryRun::is_measured);
    let mut text = format!(
        "\nTensor memory by formula and by dry run, in GiB (states: parameters and optimizer)\n\n\
         {:<4}{:<32}{:<14}{:>15}{:>12}{:>14}{:>12}{:>9}{}{:>16}\n",
        "",
        "mesh",
        "",
        "states, formula",
        "dry run",
        "peak, formula",
        "dry run",
        "diff",
        if is_measured {
            " allocated  reserved  unused"
        } else {
            ""
        },
        "with overhead"
    );
    for (index, (strategy, run)) in runs.iter().enumerate() {
        match run {
            Ok(run) => lines(&mut text, (index + 1, strategy), run, request),
            Err(why) => {
                let mesh = strategy.degrees.to_string();
                let _ = writeln!(text, "{:<4}{mesh:<32}no dry run: {why}", index + 1);
            }
        }
    }
    if is_measured {
        text.push_str(
            "\nallocated, reserved: the peaks of CUDA's caching allocator, measured on a simulated GPU. What it reserves and \
             no tensor uses is fragmentation.\n",
        );
    }
    if let Some(skew) = found().find_map(|run| run.routing_skew) {
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

fn lines(
    text: &mut String,
    (number, strategy): (usize, &Strategy),
    run: &DryRun,
    request: &PlanRequest,
) {
    let capacity = request.cluster.accelerator.memory.value;
    for (index, rank) in run.ranks.iter().enumerate() {
        let (number, mesh) = match index {
            0 => (number.to_string(), strategy.degrees.to_string()),
            _ => (String::new(), String::new()),
        };
        let required = rank.required(&request.overheads, strategy);
        let verdict = if required > capacity {
            "too large"
        } else {
            "fits"
        };
        let allocator = rank.allocator.map(|found| {
            let (allocated, reserved) = (found.allocated / GIB, found.reserved / GIB);
            format!(
                "{allocated:>10.2}{reserved:>10.2}{:>7.1}%",
                100.0 * found.fragmentation()
            )
        });
        let allocator = allocator.unwrap_or_default();
        let _ = writeln!(
            text,
            "{number:<4}{mesh:<32}{:<14}{:>15.3}{:>12.3}{:>14.2}{:>12.2}{:>+8.1}%{allocator}{:>7.1} {verdict}",
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

//! The report of a search by dry runs, for models that no formula describes.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde_json::{Value, json};
use trainyard_plan::any_model::{AnyModelPlan, AnyModelRequest, Layout, Outcome};

use super::GIB;
use super::json::{Named, merged};
use super::prose::describe_term;
use super::table::{Style, describe_cluster, table, wrapped};

const HEADINGS: [&str; 9] = [
    "",
    "mesh",
    "ZeRO",
    "micro-batches",
    "recompute",
    "peak GiB",
    "step ms",
    "samples/s",
    "HFU",
];

/// A request, what became of every layout, and how to train the best.
#[derive(Clone, Debug)]
pub struct AnyModelReport {
    request: AnyModelRequest,
    /// The program that trains the model.
    program: String,
    /// The model's config file.
    model: String,
    /// The config keys of the command line, which all plans have.
    overrides: Vec<String>,
    /// The fastest plan of every layout that fits, fastest first.
    plans: Vec<AnyModelPlan>,
    /// The plan with the smallest peak memory of those that do not fit.
    smallest: Option<AnyModelPlan>,
    num_too_large: usize,
    impossible: Vec<(Layout, String)>,
}

impl AnyModelReport {
    /// The report of a search with these outcomes, for a program, its config file and the config keys of the command
    /// line.
    pub fn of(
        request: AnyModelRequest,
        (program, model, overrides): (String, String, Vec<String>),
        outcomes: impl IntoIterator<Item = (Layout, Outcome)>,
    ) -> AnyModelReport {
        let (mut plans, mut too_large, mut impossible) = (Vec::new(), Vec::new(), Vec::new());
        for (layout, outcome) in outcomes {
            match outcome {
                Outcome::Fits(plan) => plans.push(plan),
                Outcome::TooLarge(plan) => too_large.push(plan),
                Outcome::Impossible(why) => impossible.push((layout, why)),
            }
        }
        plans.sort_by(|a, b| a.time.likely.total_cmp(&b.time.likely));
        let num_too_large = too_large.len();
        let by_memory = |a: &AnyModelPlan, b: &AnyModelPlan| a.peak_bytes.total_cmp(&b.peak_bytes);
        AnyModelReport {
            request,
            program,
            model,
            overrides,
            plans,
            smallest: too_large.into_iter().min_by(by_memory),
            num_too_large,
            impossible,
        }
    }

    /// The fastest plan, if any fits.
    pub fn best(&self) -> Option<&AnyModelPlan> {
        self.plans.first()
    }

    /// The best plans as a table, then the reasons and the command that trains the best.
    pub fn to_text(&self, most: usize, style: Style) -> String {
        let mut text = format!("{}\n", self.heading());
        if !self.plans.is_empty() {
            let plans = self.plans.iter().take(most).enumerate();
            let rows: Vec<_> = plans.map(|(index, plan)| self.row(index, plan)).collect();
            let _ = write!(text, "\n{}", table(HEADINGS, [1, 4], &rows, style));
        }
        for sentence in self.sentences() {
            let _ = write!(text, "\n{}", wrapped(&sentence));
        }
        if let Some(best) = self.best() {
            let _ = write!(text, "\nTrain it with\n  {}\n", self.command(best));
        }
        text
    }

    /// The plans, the reasons and what was rejected.
    pub fn to_json(&self, most: usize) -> Value {
        let plans = self.plans.iter().take(most);
        let impossible = self.impossible.iter();
        json!({
            "model": self.model,
            "plans": plans.map(|plan| self.plan_json(plan)).collect::<Vec<_>>(),
            "explanation": self.sentences(),
            "smallest_too_large": self.smallest.as_ref().map(|plan| self.plan_json(plan)),
            "num_too_large": self.num_too_large,
            "impossible": impossible.map(|(layout, why)| json!({"layout": layout, "why": why})).collect::<Vec<_>>(),
            "cluster": self.request.cluster.to_toml(),
            "global_batch": self.request.global_batch,
            "mean_error": self.request.mean_error(),
        })
    }

    fn heading(&self) -> String {
        let mut plans = self.plans.iter().chain(&self.smallest);
        let run = plans.find_map(|plan| plan.ranks.first());
        let size = run.map_or_else(String::new, |run| {
            format!(" ({} parameters)", readable_count(run.num_parameters))
        });
        format!(
            "{}{size} on {}, global batch {}",
            self.model,
            describe_cluster(&self.request.cluster),
            self.request.global_batch
        )
    }

    fn row(&self, index: usize, plan: &AnyModelPlan) -> [String; 9] {
        let (candidate, time) = (&plan.candidate, &plan.time);
        [
            (index + 1).to_string(),
            candidate.layout.degrees.to_string(),
            candidate.layout.zero_stage.to_string(),
            format!("{} x {}", candidate.micro_batch, candidate.num_microbatches),
            candidate.recompute.to_string(),
            format!("{:.1}", plan.peak_bytes / GIB),
            format!(
                "{:.2} ({:.2}..{:.2})",
                1e3 * time.likely,
                1e3 * time.low,
                1e3 * time.high
            ),
            format!("{:.0}", self.request.global_batch as f64 / time.likely),
            format!("{:.2} %", 100.0 * self.utilization(plan)),
        ]
    }

    /// The fraction of the peak that all operations reach, recomputation included.
    fn utilization(&self, plan: &AnyModelPlan) -> f64 {
        let flops: u64 = plan.ranks.iter().map(|run| run.flops).sum();
        let per_rank = flops as f64 / plan.ranks.len().max(1) as f64;
        per_rank / plan.time.likely / self.request.cluster.accelerator.peak.value
    }

    fn sentences(&self) -> Vec<String> {
        let mut sentences = match (self.plans.as_slice(), &self.smallest) {
            ([], None) => vec!["No layout can train this model with this batch.".to_owned()],
            ([], Some(smallest)) => vec![self.nearest_miss(smallest)],
            ([best, others @ ..], _) => {
                let mut sentences = vec![spent(best)];
                sentences.extend(others.first().map(|second| self.runner_up(best, second)));
                sentences
            }
        };
        if !self.plans.is_empty() && self.num_too_large > 0 {
            let capacity = self.request.capacity() / GIB;
            sentences.push(format!(
                "Layouts that do not fit into {capacity:.0} GiB with any micro-batch that was tried: {}.",
                self.num_too_large
            ));
        }
        sentences.extend(self.rejections());
        sentences.push(format!(
            "Memory and communication are counted in dry runs of the training code. Seconds are estimated from the \
             {}'s figures; no run of this model has been compared with them, so the range assumes an error of {:.0} %.",
            self.request.cluster.accelerator.name,
            100.0 * self.request.mean_error()
        ));
        sentences
    }

    fn nearest_miss(&self, smallest: &AnyModelPlan) -> String {
        let (peak, capacity) = (smallest.peak_bytes / GIB, self.request.capacity() / GIB);
        format!(
            "Nothing fits into {capacity:.0} GiB: {} needs the least memory, {peak:.1} GiB. Use more GPUs, or \
             parallelism.offload = \"cpu\" with ZeRO 3, which is not planned here.",
            describe(smallest)
        )
    }

    fn runner_up(&self, best: &AnyModelPlan, second: &AnyModelPlan) -> String {
        let slower = second.time.likely - best.time.likely;
        let terms = best.time.terms().into_iter().zip(second.time.terms());
        let reason = terms
            .map(|((name, a), (_, b))| (name, b - a))
            .max_by(|a, b| a.1.total_cmp(&b.1));
        let mut text = format!(
            "The runner-up, {}, is {:.2} ms ({:.1} %) slower",
            describe(second),
            1e3 * slower,
            100.0 * slower / best.time.likely
        );
        if let Some((name, seconds)) = reason.filter(|(_, seconds)| *seconds > 0.0) {
            let _ = write!(text, ": +{:.2} ms {}", 1e3 * seconds, describe_term(name));
        }
        text.push('.');
        if slower < self.request.mean_error() * best.time.likely {
            text.push_str(" The difference is less than the assumed error: measure both.");
        }
        text
    }

    /// Why layouts were rejected, one sentence per axis that cannot be used.
    fn rejections(&self) -> Vec<String> {
        let mut by_axis: BTreeMap<&str, &str> = BTreeMap::new();
        for (layout, why) in &self.impossible {
            let degrees = &layout.degrees;
            let axis = match (degrees.tp > 1, degrees.pp > 1) {
                (true, false) => "Tensor",
                (false, true) => "Pipeline",
                (true, true) => continue,
                (false, false) => "Data",
            };
            by_axis.entry(axis).or_insert(why);
        }
        let sentence = |(axis, why): (&str, &str)| {
            let what = if self.plans.iter().any(|plan| uses(axis, plan)) {
                "parallelism is limited"
            } else {
                "parallelism is not possible"
            };
            format!("{axis} {what}: {}", why.lines().next().unwrap_or(why))
        };
        by_axis.into_iter().map(sentence).collect()
    }

    fn command(&self, plan: &AnyModelPlan) -> String {
        let cluster = &self.request.cluster;
        let launch = match cluster.num_nodes {
            1 => "--standalone".to_owned(),
            nodes => format!("--nnodes {nodes} --rdzv-endpoint HOST:29400"),
        };
        format!(
            "trainyard run {launch} --nproc-per-node {} -- {} train {} \\\n    {}",
            cluster.gpus_per_node,
            self.program,
            self.model,
            self.keys(plan).join(" \\\n    ")
        )
    }

    /// The config keys of a plan, as overrides on a command line.
    fn keys(&self, plan: &AnyModelPlan) -> Vec<String> {
        [self.overrides.clone(), plan.candidate.overrides()].concat()
    }

    fn plan_json(&self, plan: &AnyModelPlan) -> Value {
        let time = &plan.time;
        let ranks = plan.ranks.iter();
        let estimates = json!({
            "step_seconds": time.likely,
            "step_seconds_range": [time.low, time.high],
            "step_seconds_terms": time.terms().into_iter().collect::<Named>().0,
            "peak_bytes": plan.peak_bytes,
            "ranks": ranks.map(|run| json!({
                "peak_bytes": run.peak_bytes,
                "bytes_by_kind": run.bytes_by_kind,
                "flops": run.flops,
            })).collect::<Vec<_>>(),
            "hfu": self.utilization(plan),
            "overrides": self.keys(plan),
        });
        merged(json!(plan.candidate), estimates)
    }
}

fn uses(axis: &str, plan: &AnyModelPlan) -> bool {
    let degrees = &plan.candidate.layout.degrees;
    match axis {
        "Tensor" => degrees.tp > 1,
        "Pipeline" => degrees.pp > 1,
        _ => degrees.data_parallel() > 1,
    }
}

/// A plan's settings on one line.
fn describe(plan: &AnyModelPlan) -> String {
    let candidate = &plan.candidate;
    format!(
        "{}, ZeRO {}, micro-batch size {}, {} recomputation",
        candidate.layout.degrees,
        candidate.layout.zero_stage,
        candidate.micro_batch,
        match candidate.recompute {
            trainyard_plan::Recompute::None => "no".to_owned(),
            other => other.to_string(),
        }
    )
}

/// What the step's time is spent on, the largest terms first.
fn spent(plan: &AnyModelPlan) -> String {
    let mut terms = plan.time.terms();
    terms.sort_by(|a, b| b.1.total_cmp(&a.1));
    let share = |seconds: f64| 100.0 * seconds / plan.time.likely;
    let shown = terms.iter().filter(|(_, seconds)| share(*seconds) >= 1.0);
    let shown: Vec<String> = shown
        .map(|(name, seconds)| format!("{:.0} % {}", share(*seconds), describe_term(name)))
        .collect();
    let mut text = format!("The step spends its time on {}.", shown.join(", "));
    if terms.first().is_some_and(|(name, _)| *name == "launch") {
        text.push_str(
            " The GPUs wait for the host: a larger batch or fewer GPUs would use them better.",
        );
    }
    text
}

fn readable_count(count: u64) -> String {
    match count {
        0..1_000_000 => format!("{:.1} k", count as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} M", count as f64 / 1e6),
        _ => format!("{:.1} B", count as f64 / 1e9),
    }
}

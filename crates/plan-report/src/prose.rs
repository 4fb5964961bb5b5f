//! The explanation of a plan in sentences.

use super::{Compared, GIB, Report};
use trainyard_plan::{
    Bottleneck, Input, NearestMiss, Offload, Plan, PlanDiff, Recompute, Sensitivity, Sites,
    Synchronization,
};
use trainyard_trace::counted;

/// The name of a step time's term in reports.
pub fn describe_term(name: &str) -> &str {
    match name {
        "compute" => "compute",
        "recomputation" => "activation recomputation",
        "launch" => "kernel launch overhead",
        "tensor" => "tensor-parallel communication (tp)",
        "context" => "context-parallel communication (cp)",
        "expert" => "expert-parallel communication (ep)",
        "pipeline" => "pipeline-parallel communication (pp)",
        "data" => "data-parallel communication (dp)",
        "bubble" => "pipeline bubble",
        "optimizer" => "optimizer step",
        "offload" => "offload transfers",
        "outer" => "outer steps between replicas (dp_outer)",
        other => other,
    }
}

/// A plan's settings on one line, the mesh first.
pub fn describe(plan: &Plan) -> String {
    let strategy = &plan.strategy;
    let mut settings = vec![strategy.degrees.to_string()];
    if strategy.degrees.pp > 1 {
        let (m, pipeline) = (strategy.num_microbatches(), strategy.pipeline);
        settings.push(format!(
            "{pipeline} with {}",
            counted(m as u64, "micro-batch")
        ));
    }
    settings.push(format!("micro-batch size {}", strategy.micro_batch));
    settings.push(format!("ZeRO {}", strategy.zero_stage));
    settings.push(match strategy.recompute {
        Recompute::None => "no recomputation".to_owned(),
        Recompute::SelectiveOp => "selective-op recomputation".to_owned(),
        other => format!("{other} recomputation"),
    });
    match strategy.offload {
        Offload::None => {}
        Offload::Cpu => settings.push("states offloaded to host memory".to_owned()),
        Offload::Nvme => settings.push("states offloaded to NVMe".to_owned()),
    }
    if strategy.synchronization != Synchronization::PLAIN {
        settings.push(strategy.synchronization.to_string());
    }
    settings.join(", ")
}

impl Report {
    /// The explanation, one sentence per reason, the most important first.
    pub fn sentences(&self) -> Vec<String> {
        let mut sentences = match &self.explanation {
            Ok(explanation) => {
                let mut sentences = vec![bottleneck(&explanation.bottleneck)];
                let choice = explanation.between_sites.as_ref();
                sentences.extend(choice.map(|choice| self.describe_site_choice(choice)));
                let runner_up = explanation.runner_up.as_ref();
                sentences.extend(runner_up.map(|diff| describe_runner_up(self, diff)));
                let changes = explanation.sensitivities.iter();
                let changes: Vec<String> = changes.map(|each| sensitivity(self, each)).collect();
                sentences.push(if changes.is_empty() {
"The choice of mesh is robust: neither four times nor a quarter of the memory, link \
                             bandwidth or network bandwidth changes it, nor half or twice the global batch."
                        .to_owned()
} else {
format!("The best mesh changes {}.", changes.join("; "))
});
                sentences
            }
            Err(Some(miss)) => self.nearest_miss(miss),
            Err(None) => vec![self.infeasible()],
        };
        let compared = self.compared.as_ref();
        sentences.extend(compared.map(|compared| describe_compared(self, compared)));
        sentences.extend(self.verdict());
        sentences
    }

    /// Why a plan has its position in the ranking.
    pub fn why(&self, index: usize) -> String {
        match (index, self.result.plans.get(index), self.best()) {
            (0, ..) => self.sentences().join(" "),
            (_, Some(plan), Some(best)) => {
                let diff = trainyard_plan::diff(best, plan);
                format!("{}: {}.", slower(&diff), differences(&diff, 4))
            }
            _ => String::new(),
        }
    }

    fn nearest_miss(&self, miss: &NearestMiss) -> Vec<String> {
        let (cluster, memory) = (&self.request.cluster, &miss.plan.memory);
        let first = format!(
            "Nothing fits: none of {} strategies fits into the {:.0} GiB of one {}.",
            self.result.num_considered,
            cluster.accelerator.memory.value / GIB,
            cluster.accelerator.name
        );
        let second = format!(
            "The nearest miss is {}. Its peak memory is {:.1} GiB ({}), {:.1} GiB more than available.",
            describe(&miss.plan),
            memory.total() / GIB,
            memory.class.name(),
            miss.shortfall / GIB
        );
        let states = memory.states.on_device();
        let mut third = if states > memory.total() / 2.0 {
            format!(
                "Parameters, gradients and optimizer states take {:.1} GiB of it: shard them over more GPUs.",
                states / GIB
            )
        } else {
            format!(
                "Activations and logits take {:.1} GiB of it: use a shorter sequence or more GPUs.",
                (memory.tensors() - states) / GIB
            )
        };
        let factor = memory.total() / cluster.accelerator.memory.value;
        third.push_str(&format!(
            " About {} times as many GPUs are a starting point.",
            factor.ceil()
        ));
        vec![first, second, third]
    }

    fn infeasible(&self) -> String {
        let request = &self.request;
        format!(
            "No strategy divides {} samples over {} GPUs: choose a global batch that is a multiple of the \
             data-parallel degree.",
            request.global_batch,
            request.cluster.world_size()
        )
    }
}

fn bottleneck(bottleneck: &Bottleneck) -> String {
    match bottleneck {
        Bottleneck::Memory {
            plan,
            shortfall,
            saved,
        } => format!(
            "Memory is the bottleneck: with {:.1} GiB more per GPU, {} would take {:.2} s per step, {:.0} % less.",
            shortfall / GIB,
            describe(plan),
            plan.time.likely,
            100.0 * saved
        ),
        Bottleneck::Term { name, share } => format!(
            "The largest overhead is {}: {:.1} % of the step.",
            describe_term(name),
            100.0 * share
        ),
        Bottleneck::Compute { share } => format!(
            "The step is compute-bound: compute takes {:.0} % of it.",
            100.0 * share
        ),
    }
}

fn describe_runner_up(report: &Report, diff: &PlanDiff) -> String {
    let differences = differences(diff, 4);
    let mean_error = report.request.calibration.mean_error;
    let mut sentence = format!(
        "The runner-up, {}, is {}: {differences}.",
        describe(&diff.plan),
        slower(diff)
    );
    let share = diff.slower_by / (diff.plan.time.likely - diff.slower_by);
    if share < mean_error {
        sentence.push_str(&format!(
            " The difference is less than the mean prediction error of {:.0} %: measure both.",
            100.0 * mean_error
        ));
    }
    sentence
}

fn slower(diff: &PlanDiff) -> String {
    let best = diff.plan.time.likely - diff.slower_by;
    let (comparative, seconds) = if diff.slower_by < 0.0 {
        ("faster", -diff.slower_by)
    } else {
        ("slower", diff.slower_by)
    };
    let share = 100.0 * seconds / best;
    format!("{seconds:.3} s ({share:.1} %) {comparative}")
}

/// The largest differences, with their signs.
fn differences(diff: &PlanDiff, most: usize) -> String {
    let each = diff.terms.iter().take(most);
    let terms: Vec<String> = each
        .map(|(name, seconds)| format!("{seconds:+.3} s {}", describe_term(name)))
        .collect();
    if terms.is_empty() {
        "no term differs".to_owned()
    } else {
        terms.join(", ")
    }
}

fn sensitivity(report: &Report, sensitivity: &Sensitivity) -> String {
    let request = &report.request;
    let accelerator = &request.cluster.accelerator;
    let (value, unit) = match sensitivity.input {
        Input::Memory => (accelerator.memory.value / GIB, "GiB of memory"),
        Input::Link => (accelerator.link.value / 1e9, "GB/s of link bandwidth"),
        Input::Network => (
            accelerator.network.value / 1e9,
            "GB/s of network bandwidth per GPU",
        ),
        Input::Sites => (
            request.cluster.sites.as_ref().map_or(0.0, Sites::gbit_s),
            "Gb/s between sites",
        ),
        Input::GlobalBatch => (request.global_batch as f64, "samples in the global batch"),
    };
    format!(
        "with {:.0} {unit} instead of {value:.0} (to {})",
        value * sensitivity.factor,
        sensitivity.chosen
    )
}

fn describe_compared(report: &Report, compared: &Compared) -> String {
    let Compared {
        diff,
        position,
        shortfall,
    } = compared;
    let plan = &diff.plan;
    let ranking = match position {
        Some(position) => format!("ranks {position} of {} meshes", report.result.plans.len()),
        None => format!("does not fit: it needs {:.1} GiB more", shortfall / GIB),
    };
    format!(
        "Comparison: {}, takes {:.2} s per step and {ranking}. Relative to the best plan it is {}; by term: {}.",
        describe(plan),
        plan.time.likely,
        slower(diff),
        differences(diff, diff.terms.len())
    )
}

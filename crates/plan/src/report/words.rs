//! Reasons in sentences.

use super::{Compared, GIB, Report};
use crate::{Binding, Flip, Input, Lost, Miss, Offload, Plan};

/// What a term of a step's time is, in words.
pub fn term(name: &str) -> &str {
    match name {
        "compute" => "computing",
        "recomputation" => "computing again what was not kept",
        "launch" => "launching kernels",
        "tensor" => "messages of shared matrices (tp)",
        "context" => "keys and values of other positions (cp)",
        "expert" => "routed tokens (ep)",
        "pipeline" => "messages between stages (pp)",
        "data" => "gradients and sharded parameters (dp)",
        "bubble" => "waiting for other stages (bubble)",
        "optimizer" => "the optimiser's step",
        "offload" => "moving states to and from main memory",
        other => other,
    }
}

/// The plan's choices in a sentence.
pub fn in_words(plan: &Plan) -> String {
    let strategy = &plan.strategy;
    let mut parts = vec![strategy.degrees.to_string()];
    if strategy.degrees.pp > 1 {
        let (m, layers) = (strategy.num_microbatches(), strategy.layers);
        parts.push(format!("{layers} with {m} micro-batches"));
    }
    parts.push(match strategy.micro_batch {
        1 => "one sample at a time".to_owned(),
        size => format!("{size} samples at a time"),
    });
    parts.push(format!("ZeRO {}", strategy.zero_stage));
    parts.push(match strategy.recompute {
        crate::Recompute::None => "nothing recomputed".to_owned(),
        crate::Recompute::Products => "every second product recomputed".to_owned(),
        other => format!("{other} recomputation"),
    });
    if strategy.offload != Offload::None {
        parts.push("states in main memory".to_owned());
    }
    parts.join(", ")
}

impl Report {
    /// Why, a sentence per reason, the most important first.
    pub fn sentences(&self) -> Vec<String> {
        let mut said = match &self.why {
            Ok(why) => {
                let mut said = vec![binding(&why.binding)];
                said.extend(why.runner_up.as_ref().map(|lost| runner_up(self, lost)));
                let flips = why.flips.iter().map(|each| flip(self, each));
                let flips: Vec<String> = flips.collect();
                if !flips.is_empty() {
                    said.push(format!("The choice changes {}.", flips.join("; ")));
                }
                if why.flips.is_empty() {
                    let same = "No input changes the mesh: not four times the memory, links or network, \
                                nor a quarter of them, nor half or twice the batch.";
                    said.push(same.to_owned());
                }
                said
            }
            Err(Some(miss)) => self.nearest(miss),
            Err(None) => vec![self.nothing()],
        };
        said.extend(
            self.compared
                .as_ref()
                .map(|compared| beside(self, compared)),
        );
        said.extend(self.verdict());
        said
    }

    /// Why a plan has its place.
    pub fn why(&self, place: usize) -> String {
        match (place, self.found.plans.get(place), self.best()) {
            (0, ..) => self.sentences().join(" "),
            (_, Some(plan), Some(best)) => {
                let lost = crate::explain::lost(best, plan);
                format!("{}: {}.", slower(&lost), differences(&lost, 4))
            }
            _ => String::new(),
        }
    }

    fn nearest(&self, miss: &Miss) -> Vec<String> {
        let (cluster, memory) = (&self.question.cluster, &miss.plan.memory);
        let first = format!(
            "Nothing fits: of {} ways none stays within {:.0} GiB of {}.",
            self.found.num_considered,
            cluster.accelerator.memory.value / GIB,
            cluster.accelerator.name
        );
        let second = format!(
            "The nearest miss is {}. At the fullest ({}) it needs {:.1} GiB and lacks {:.1} GiB on each.",
            in_words(&miss.plan),
            memory.class.name(),
            memory.total() / GIB,
            miss.missing / GIB
        );
        let states = memory.states.on_device();
        let mut third = match states > memory.total() / 2.0 {
            true => format!(
                "Parameters, gradients and optimiser take {:.1} GiB of it: more ranks would share them.",
                states / GIB
            ),
            false => format!(
                "Activations and logits take {:.1} GiB of it: a shorter sequence would need less.",
                (memory.total() - states - memory.overhead) / GIB
            ),
        };
        let factor = memory.total() / cluster.accelerator.memory.value;
        third.push_str(&format!(
            " About {} times as many GPUs would be a beginning.",
            factor.ceil()
        ));
        vec![first, second, third]
    }

    fn nothing(&self) -> String {
        let question = &self.question;
        format!(
            "No way divides {} samples over {} GPUs: choose a batch that the number of model copies divides.",
            question.global_batch,
            question.cluster.world_size()
        )
    }
}

fn binding(binding: &Binding) -> String {
    match binding {
        Binding::Memory {
            plan,
            missing,
            saved,
        } => format!(
            "Memory binds: with {:.1} GiB more on each GPU, {} would take {:.2} s, {:.0} % less.",
            missing / GIB,
            in_words(plan),
            plan.time.likely,
            100.0 * saved
        ),
        Binding::Term { name, share } => format!(
            "What holds it back most beside computing is {}: {:.1} % of the step.",
            term(name),
            100.0 * share
        ),
        Binding::Compute { share } => format!(
            "Computing takes {:.0} % of the step; nothing else holds it back.",
            100.0 * share
        ),
    }
}

fn runner_up(report: &Report, lost: &Lost) -> String {
    let differences = differences(lost, 4);
    let doubt = report.question.calibration.spread;
    let mut said = format!(
        "The runner-up, {}, is {}: {differences}.",
        in_words(&lost.plan),
        slower(lost)
    );
    let share = lost.slower / (lost.plan.time.likely - lost.slower);
    if share < doubt {
        said.push_str(&format!(
            " That is less than the {:.0} % by which predictions are off: measure both.",
            100.0 * doubt
        ));
    }
    said
}

fn slower(lost: &Lost) -> String {
    let before = lost.plan.time.likely - lost.slower;
    let (word, seconds) = match lost.slower < 0.0 {
        true => ("faster", -lost.slower),
        false => ("slower", lost.slower),
    };
    let share = 100.0 * seconds / before;
    format!("{seconds:.3} s ({share:.1} %) {word}")
}

/// The largest differences, with their signs.
fn differences(lost: &Lost, most: usize) -> String {
    let each = lost.terms.iter().take(most);
    let words: Vec<String> = each
        .map(|(name, seconds)| format!("{seconds:+.3} s {}", term(name)))
        .collect();
    match words.is_empty() {
        true => "no term differs".to_owned(),
        false => words.join(", "),
    }
}

fn flip(report: &Report, flip: &Flip) -> String {
    let question = &report.question;
    let accelerator = &question.cluster.accelerator;
    let (what, now, unit) = match flip.what {
        Input::Memory => ("memory", accelerator.memory.value / GIB, "GiB"),
        Input::Link => ("links", accelerator.link.value / 1e9, "GB/s"),
        Input::Network => ("network", accelerator.network.value / 1e9, "GB/s per GPU"),
        Input::GlobalBatch => ("global batch", question.global_batch as f64, "samples"),
    };
    format!(
        "with {what} of {:.0} {unit} instead of {now:.0} to {}",
        now * flip.factor,
        flip.chosen
    )
}

fn beside(report: &Report, compared: &Compared) -> String {
    let Compared {
        lost,
        place,
        missing,
    } = compared;
    let plan = &lost.plan;
    let ranks = match place {
        Some(place) => format!("ranks {place} of {} meshes", report.found.plans.len()),
        None => format!("does not fit: it lacks {:.1} GiB", missing / GIB),
    };
    format!(
        "Compared: {}, takes {:.2} s and {ranks}. Beside the best it is {}, term by term: {}.",
        in_words(plan),
        plan.time.likely,
        slower(lost),
        differences(lost, lost.terms.len())
    )
}

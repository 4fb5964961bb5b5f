//! Why this plan: what holds it back, why the next one lost, and what would change the choice.

use crate::{Degrees, Figure, Found, Plan, Question, search};

/// The reasons for a choice.
#[derive(Clone, Debug, PartialEq)]
pub struct Explanation {
    /// What holds the chosen plan back.
    pub binding: Binding,
    /// Why the second came second, if there is one.
    pub runner_up: Option<Lost>,
    /// Which changes of input change the choice.
    pub flips: Vec<Flip>,
}

/// What holds a plan back.
#[derive(Clone, Debug, PartialEq)]
pub enum Binding {
    /// With more memory another plan would be faster.
    Memory {
        /// That plan.
        plan: Box<Plan>,
        /// Bytes it lacks.
        missing: f64,
        /// The share of the chosen plan's time that it would save.
        saved: f64,
    },
    /// Most of the time that is not spent computing.
    Term {
        /// Its name among the terms of [`crate::Time`].
        name: &'static str,
        /// Its share of the step.
        share: f64,
    },
    /// Computing takes nearly all.
    Compute {
        /// Its share of the step.
        share: f64,
    },
}

/// Why a plan lost.
#[derive(Clone, Debug, PartialEq)]
pub struct Lost {
    /// The plan.
    pub plan: Plan,
    /// Seconds it takes longer.
    pub slower: f64,
    /// Seconds it takes longer by term, the largest difference first; what it saves is negative.
    pub terms: Vec<(&'static str, f64)>,
}

/// A change that leads to another choice.
#[derive(Clone, Debug, PartialEq)]
pub struct Flip {
    /// What changes.
    pub what: Input,
    /// By how much at least, to within a tenth.
    pub factor: f64,
    /// What is chosen then.
    pub chosen: Degrees,
}

/// An input that may change.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum Input {
    /// Bytes of an accelerator.
    Memory,
    /// Bytes per second inside a machine.
    Link,
    /// Bytes per second between machines.
    Network,
    /// Samples in a step.
    GlobalBatch,
}

/// Where nothing fits: the plan that lacks least, and the bytes it lacks on each rank.
#[derive(Clone, Debug, PartialEq)]
pub struct Miss {
    /// The plan.
    pub plan: Plan,
    /// Bytes it lacks.
    pub missing: f64,
}

/// More than this share of the time saved, and memory is said to be what binds.
const WORTH_SAYING: f64 = 0.02;

/// Changes by more than this either way are not looked at.
const FARTHEST: f64 = 4.0;

/// The reasons, or what is missing where nothing fits.
///
/// # Errors
/// Where nothing fits there is nothing to explain: what lacks least is returned, if anything could be meant.
pub fn explain(question: &Question, found: &Found) -> Result<Explanation, Option<Box<Miss>>> {
    let room = question.cluster.accelerator.memory.value;
    let Some(best) = found.plans.first() else {
        let miss = found.nearest_miss.clone().map(|plan| {
            let missing = plan.memory.total() - room;
            Box::new(Miss { plan, missing })
        });
        return Err(miss);
    };
    Ok(Explanation {
        binding: binding(found, best, room),
        runner_up: found.plans.get(1).map(|plan| lost(best, plan)),
        flips: flips(question, best.strategy.degrees),
    })
}

fn binding(found: &Found, best: &Plan, room: f64) -> Binding {
    if let Some(plan) = &found.with_more_memory {
        let saved = 1.0 - plan.time.likely / best.time.likely;
        if saved > WORTH_SAYING {
            return Binding::Memory {
                plan: Box::new(plan.clone()),
                missing: plan.memory.total() - room,
                saved,
            };
        }
    }
    let share = |seconds: f64| seconds / best.time.likely;
    let waits = best.time.terms().into_iter().skip(1);
    let most = waits.max_by(|a, b| a.1.total_cmp(&b.1));
    match most {
        Some((name, seconds)) if share(seconds) > WORTH_SAYING => Binding::Term {
            name,
            share: share(seconds),
        },
        _ => Binding::Compute {
            share: share(best.time.compute),
        },
    }
}

pub(crate) fn lost(best: &Plan, plan: &Plan) -> Lost {
    let pairs = plan.time.terms().into_iter().zip(best.time.terms());
    let mut terms: Vec<(&'static str, f64)> = pairs
        .map(|((name, own), (_, chosen))| (name, own - chosen))
        .filter(|(_, difference)| difference.abs() > 1e-4 * best.time.likely)
        .collect();
    terms.sort_by(|a, b| b.1.abs().total_cmp(&a.1.abs()));
    Lost {
        slower: plan.time.likely - best.time.likely,
        plan: plan.clone(),
        terms,
    }
}

/// The least change of every input, up and down, that changes the choice.
fn flips(question: &Question, chosen: Degrees) -> Vec<Flip> {
    let figures = [Input::Memory, Input::Link, Input::Network];
    let mut found = Vec::new();
    for what in figures {
        for farthest in [FARTHEST, 1.0 / FARTHEST] {
            found.extend(least_change(question, chosen, what, farthest));
        }
    }
    for factor in [0.5, 2.0] {
        let other = choice(&changed(question, Input::GlobalBatch, factor));
        if let Some(other) = other.filter(|other| *other != chosen) {
            found.push(Flip {
                what: Input::GlobalBatch,
                factor,
                chosen: other,
            });
        }
    }
    found
}

/// Halves the way between no change and the farthest until it is known to within a tenth.
fn least_change(question: &Question, chosen: Degrees, what: Input, farthest: f64) -> Option<Flip> {
    let differs = |factor: f64| choice(&changed(question, what, factor)).filter(|d| *d != chosen);
    let mut flip = Flip {
        what,
        factor: farthest,
        chosen: differs(farthest)?,
    };
    let mut same = 1.0f64;
    while (flip.factor / same).ln().abs() > 0.1 {
        let between = (flip.factor * same).sqrt();
        match differs(between) {
            Some(chosen) => {
                flip.factor = between;
                flip.chosen = chosen;
            }
            None => same = between,
        }
    }
    Some(flip)
}

fn choice(question: &Question) -> Option<Degrees> {
    let found = search(question);
    found.plans.first().map(|plan| plan.strategy.degrees)
}

fn changed(question: &Question, what: Input, factor: f64) -> Question {
    let mut question = question.clone();
    let accelerator = &mut question.cluster.accelerator;
    let scale = |figure: &mut Figure| figure.value *= factor;
    match what {
        Input::Memory => scale(&mut accelerator.memory),
        Input::Link => {
            scale(&mut accelerator.link);
            scale(&mut accelerator.link_per_peer);
        }
        Input::Network => scale(&mut accelerator.network),
        Input::GlobalBatch => {
            let batch = (question.global_batch as f64 * factor).round();
            question.global_batch = (batch as usize).max(1);
        }
    }
    question
}

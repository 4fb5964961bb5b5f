//! Why the search chose a plan: its bottleneck, why the runner-up lost, and which inputs would change the choice.

use crate::{Degrees, Plan, PlanRequest, SearchResult, SourcedValue, search};

/// The reasons for a choice.
#[derive(Clone, Debug, PartialEq)]
pub struct Explanation {
    /// The chosen plan's bottleneck.
    pub bottleneck: Bottleneck,
    /// How the runner-up differs, if there is one.
    pub runner_up: Option<PlanDiff>,
    /// The input changes that would lead to another choice.
    pub sensitivities: Vec<Sensitivity>,
    /// Why replicas in different sites are joined as they are, if there are several sites.
    pub between_sites: Option<SiteChoice>,
}

/// The fastest plan of the other way to join sites: in every step, or by local updates.
#[derive(Clone, Debug, PartialEq)]
pub struct SiteChoice {
    /// The plan that was not chosen.
    pub rejected: Plan,
    /// How many times as many samples per second local updates train as gradients in every step.
    pub speedup: f64,
    /// How many times they must train, because they change convergence.
    pub required_speedup: f64,
}

/// A plan's bottleneck.
#[derive(Clone, Debug, PartialEq)]
pub enum Bottleneck {
    /// Memory: another plan would be faster, but it does not fit.
    Memory {
        /// The faster plan.
        plan: Box<Plan>,
        /// Bytes by which it exceeds device memory.
        shortfall: f64,
        /// The fraction of the chosen plan's step time that it would save.
        saved: f64,
    },
    /// The largest term of the step time other than compute.
    Term {
        /// The term's name, as in [`crate::Time::terms`].
        name: &'static str,
        /// Its fraction of the step.
        share: f64,
    },
    /// Compute: no other term is significant.
    Compute {
        /// Its fraction of the step.
        share: f64,
    },
}

/// The difference of a plan to the best one.
#[derive(Clone, Debug, PartialEq)]
pub struct PlanDiff {
    /// The compared plan.
    pub plan: Plan,
    /// Seconds by which the plan is slower.
    pub slower_by: f64,
    /// The difference of every term in seconds, largest first; negative where the plan is faster.
    pub terms: Vec<(&'static str, f64)>,
}

/// The smallest change of one input that leads to another choice.
#[derive(Clone, Debug, PartialEq)]
pub struct Sensitivity {
    /// The input that changes.
    pub input: Input,
    /// The factor by which it changes, to within ten percent.
    pub factor: f64,
    /// The mesh that is chosen then.
    pub chosen: Degrees,
}

/// An input whose influence on the choice is tested.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum Input {
    /// Device memory of an accelerator.
    Memory,
    /// Bandwidth of the links within a node.
    Link,
    /// Bandwidth of the network between nodes.
    Network,
    /// Bandwidth of the network between sites.
    Sites,
    /// Samples in a step.
    GlobalBatch,
}

/// If nothing fits: the plan with the smallest shortfall.
#[derive(Clone, Debug, PartialEq)]
pub struct NearestMiss {
    /// The plan.
    pub plan: Plan,
    /// Bytes that every rank of the fullest class lacks.
    pub shortfall: f64,
}

/// Smallest fraction of the step time that counts as a bottleneck.
const SIGNIFICANT: f64 = 0.02;

/// The largest factor, up or down, by which inputs are varied.
const MAX_FACTOR: f64 = 4.0;

/// Explains the result of a search.
///
/// # Errors
/// Nothing fits. The error holds the nearest miss, or `None` if no strategy divides the batch and the ranks.
pub fn explain(
    request: &PlanRequest,
    result: &SearchResult,
) -> Result<Explanation, Option<Box<NearestMiss>>> {
    let capacity = request.cluster.accelerator.memory.value;
    let Some(best) = result.plans.first() else {
        let miss = result.nearest_miss.clone().map(|plan| {
            let shortfall = plan.memory.total() - capacity;
            Box::new(NearestMiss { plan, shortfall })
        });
        return Err(miss);
    };
    Ok(Explanation {
        bottleneck: bottleneck(result, best, capacity),
        runner_up: result.plans.get(1).map(|plan| diff(best, plan)),
        sensitivities: sensitivities(request, best.strategy.degrees),
        between_sites: site_choice(&result.plans),
    })
}

/// Compares the best plan with the fastest one of the other way to join sites. A margin that the second one does not reach is
/// part of the order of plans.
fn site_choice(plans: &[Plan]) -> Option<SiteChoice> {
    let is_local = |plan: &Plan| plan.strategy.synchronization.local_updates().is_some();
    let best = plans.first()?;
    let rejected = plans.iter().find(|plan| is_local(plan) != is_local(best))?;
    let (local, plain) = if is_local(best) {
        (best, rejected)
    } else {
        (rejected, best)
    };
    Some(SiteChoice {
        rejected: rejected.clone(),
        speedup: plain.time.likely / local.time.likely,
        required_speedup: local.strategy.synchronization.required_speedup(),
    })
}

fn bottleneck(result: &SearchResult, best: &Plan, capacity: f64) -> Bottleneck {
    if let Some(plan) = &result.with_more_memory {
        let saved = 1.0 - plan.time.likely / best.time.likely;
        if saved > SIGNIFICANT {
            return Bottleneck::Memory {
                plan: Box::new(plan.clone()),
                shortfall: plan.memory.total() - capacity,
                saved,
            };
        }
    }
    let share = |seconds: f64| seconds / best.time.likely;
    let overheads = best.time.terms().into_iter().skip(1);
    let most = overheads.max_by(|a, b| a.1.total_cmp(&b.1));
    match most {
        Some((name, seconds)) if share(seconds) > SIGNIFICANT => Bottleneck::Term {
            name,
            share: share(seconds),
        },
        _ => Bottleneck::Compute {
            share: share(best.time.compute),
        },
    }
}

/// Why `plan` takes longer than `best`: the difference of every term of the step time.
pub fn diff(best: &Plan, plan: &Plan) -> PlanDiff {
    let pairs = plan.time.terms().into_iter().zip(best.time.terms());
    let mut terms: Vec<(&'static str, f64)> = pairs
        .map(|((name, own), (_, chosen))| (name, own - chosen))
        .filter(|(_, difference)| difference.abs() > 1e-4 * best.time.likely)
        .collect();
    terms.sort_by(|a, b| b.1.abs().total_cmp(&a.1.abs()));
    PlanDiff {
        slower_by: plan.time.likely - best.time.likely,
        plan: plan.clone(),
        terms,
    }
}

/// For every input, the smallest increase and decrease that change the choice.
fn sensitivities(request: &PlanRequest, chosen: Degrees) -> Vec<Sensitivity> {
    let mut inputs = vec![Input::Memory, Input::Link, Input::Network];
    inputs.extend(request.cluster.sites.as_ref().map(|_| Input::Sites));
    let mut found = Vec::new();
    for input in inputs {
        for limit in [MAX_FACTOR, 1.0 / MAX_FACTOR] {
            found.extend(least_change(request, chosen, input, limit));
        }
    }
    for factor in [0.5, 2.0] {
        let other = choice(&changed(request, Input::GlobalBatch, factor));
        if let Some(other) = other.filter(|other| *other != chosen) {
            found.push(Sensitivity {
                input: Input::GlobalBatch,
                factor,
                chosen: other,
            });
        }
    }
    found
}

/// Bisects (on a logarithmic scale) between no change and the limit.
fn least_change(
    request: &PlanRequest,
    chosen: Degrees,
    input: Input,
    limit: f64,
) -> Option<Sensitivity> {
    let differs = |factor: f64| choice(&changed(request, input, factor)).filter(|d| *d != chosen);
    let mut sensitivity = Sensitivity {
        input,
        factor: limit,
        chosen: differs(limit)?,
    };
    let mut unchanged = 1.0f64;
    while (sensitivity.factor / unchanged).ln().abs() > 0.1 {
        let between = (sensitivity.factor * unchanged).sqrt();
        match differs(between) {
            Some(chosen) => {
                sensitivity.factor = between;
                sensitivity.chosen = chosen;
            }
            None => unchanged = between,
        }
    }
    Some(sensitivity)
}

fn choice(request: &PlanRequest) -> Option<Degrees> {
    let found = search(request);
    found.plans.first().map(|plan| plan.strategy.degrees)
}

fn changed(request: &PlanRequest, input: Input, factor: f64) -> PlanRequest {
    let mut request = request.clone();
    let accelerator = &mut request.cluster.accelerator;
    let scale = |value: &mut SourcedValue| value.value *= factor;
    match input {
        Input::Memory => scale(&mut accelerator.memory),
        Input::Link => {
            scale(&mut accelerator.link);
            scale(&mut accelerator.link_per_peer);
        }
        Input::Network => scale(&mut accelerator.network),
        Input::Sites => {
            let sites = request.cluster.sites.as_mut();
            sites
                .into_iter()
                .for_each(|sites| scale(&mut sites.bandwidth));
        }
        Input::GlobalBatch => {
            let batch = (request.global_batch as f64 * factor).round();
            request.global_batch = (batch as usize).max(1);
        }
    }
    request
}

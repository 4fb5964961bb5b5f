//! Where the seconds of a run went, from the traces of its ranks.
//!
//! Every moment of a step belongs to one part: to what the rank waits for if it waits, else to what it
//! computes. So the parts sum to the step, as the terms of a prediction do. The rank that computes longest
//! is the one whose parts are taken, because a prediction speaks of the slowest rank; of its steps the middle
//! half by length.

use std::collections::BTreeMap;

use trainyard_mesh::{Axis, AxisSet, Mesh, MeshError};
use trainyard_trace::{Events, Moments, Span, SpanKind};

use super::measured::Measured;
use super::part::Part;
use super::wire::{self, WireTime};
use crate::{Cluster, Degrees};

/// Seconds by part, and of collectives.
#[derive(Clone, Debug, PartialEq)]
pub struct Traced {
    /// Whose parts they are.
    pub rank: usize,
    /// How many steps they are the mean of.
    pub num_steps: usize,
    /// Collectives, a line for each size.
    pub wires: Vec<WireTime>,
    parts: BTreeMap<Part, f64>,
}

/// Why traces say nothing about a plan.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum TracedError {
    /// Nothing to read.
    #[error("the traces have no whole step: profile a few steps more")]
    Empty,
    /// Ranks that the plan does not have.
    #[error("the traces have a rank {rank}, the plan {world} ranks: it is not what ran")]
    Rank {
        /// Which.
        rank: usize,
        /// Of how many.
        world: usize,
    },
    /// Another mesh.
    #[error("{group} had {found} ranks, in the plan it has {planned}: it is not what ran")]
    Group {
        /// Its axes.
        group: String,
        /// In the trace.
        found: usize,
        /// In the plan.
        planned: usize,
    },
    /// A mesh that cannot be.
    #[error(transparent)]
    Mesh(#[from] MeshError),
}

impl Traced {
    /// Reads the ranks of a run that was split as `degrees` say.
    pub fn of(
        ranks: &[Events],
        degrees: &Degrees,
        cluster: &Cluster,
    ) -> Result<Traced, TracedError> {
        let mesh = degrees.mesh()?;
        ranks.iter().try_for_each(|events| agrees(events, &mesh))?;
        let has_stages = mesh.size(Axis::Pp) > 1;
        let spent = ranks.iter().filter_map(|events| spent(events, has_stages));
        let computing = |each: &Traced| each.seconds(Part::Computing);
        let slowest = spent.max_by(|a, b| computing(a).total_cmp(&computing(b)));
        let slowest = slowest.ok_or(TracedError::Empty)?;
        Ok(Traced {
            wires: wire::times(ranks, &mesh, cluster),
            ..slowest
        })
    }

    /// Seconds of a part in a step.
    pub fn seconds(&self, part: Part) -> f64 {
        self.parts.get(&part).copied().unwrap_or(0.0)
    }

    /// Seconds of a step: all parts.
    pub fn step(&self) -> f64 {
        self.parts.values().sum()
    }

    /// What stands in for metrics where a run left none.
    pub fn measured(&self) -> Measured {
        Measured {
            seconds: self.step(),
            num_steps: self.num_steps,
            ..Measured::default()
        }
    }
}

/// Whether the groups of a trace are those of the mesh.
fn agrees(events: &Events, mesh: &Mesh) -> Result<(), TracedError> {
    let (rank, world) = (events.rank, mesh.world_size());
    if rank >= world {
        return Err(TracedError::Rank { rank, world });
    }
    for each in &events.collectives {
        let Ok(axes) = each.group.parse::<AxisSet>() else {
            continue;
        };
        let (found, planned) = (each.group_size, mesh.size_of(axes));
        if found != planned {
            let group = each.group.clone();
            return Err(TracedError::Group {
                group,
                found,
                planned,
            });
        }
    }
    Ok(())
}

/// One rank's parts, the mean of the middle half of its steps. The first step warms up, and is left out
/// where there are others.
fn spent(events: &Events, has_stages: bool) -> Option<Traced> {
    let steps = events
        .spans
        .iter()
        .filter(|span| span.kind == SpanKind::Step);
    let mut steps: Vec<BTreeMap<Part, f64>> =
        steps.map(|step| parts(events, step, has_stages)).collect();
    if steps.len() > 1 {
        steps.remove(0);
    }
    let length = |step: &BTreeMap<Part, f64>| step.values().sum::<f64>();
    steps.sort_by(|a, b| length(a).total_cmp(&length(b)));
    let quarter = steps.len() / 4;
    let middle = steps.get(quarter..steps.len() - quarter)?;
    if middle.is_empty() {
        return None;
    }
    let mut mean = BTreeMap::new();
    for (part, seconds) in middle.iter().flatten() {
        *mean.entry(*part).or_insert(0.0) += seconds / middle.len() as f64;
    }
    Some(Traced {
        rank: events.rank,
        num_steps: middle.len(),
        wires: Vec::new(),
        parts: mean,
    })
}

/// One step's seconds, every moment once.
fn parts(events: &Events, step: &Span, has_stages: bool) -> BTreeMap<Part, f64> {
    let within: Moments = [(step.started_ns, step.ended_ns)].into_iter().collect();
    let mut waits: BTreeMap<Part, Vec<(u64, u64)>> = BTreeMap::new();
    for each in &events.collectives {
        let wait = each.waited.into_iter();
        waits
            .entry(Part::of_wait(each, has_stages))
            .or_default()
            .extend(wait);
    }
    let spans = |is: fn(SpanKind) -> bool| {
        let spans = events.spans.iter().filter(move |span| is(span.kind));
        spans.map(|span| (span.started_ns, span.ended_ns)).collect()
    };
    let computing: [(Part, Vec<(u64, u64)>); 2] = [
        (Part::Optimizer, spans(|kind| kind == SpanKind::Optimizer)),
        (Part::Computing, spans(SpanKind::is_compute)),
    ];
    let mut left = within;
    let mut found = BTreeMap::new();
    for (part, intervals) in waits.into_iter().chain(computing) {
        let all: Moments = intervals.into_iter().collect();
        found.insert(part, seconds(&left.and(&all)));
        left = left.without(&all);
    }
    found.insert(Part::Besides, seconds(&left));
    found.insert(Part::Samples, samples(events, step));
    found
}

/// Waiting for the step's samples, which happens between the last step and this one.
fn samples(events: &Events, step: &Span) -> f64 {
    let steps = events
        .spans
        .iter()
        .filter(|span| span.kind == SpanKind::Step);
    let before = steps.map(|span| span.ended_ns);
    let last = before.filter(|end| *end <= step.started_ns).max();
    let waits = events.spans.iter().filter(|span| {
        span.kind == SpanKind::Data
            && span.started_ns >= last.unwrap_or(0)
            && span.ended_ns <= step.started_ns
    });
    waits.map(Span::duration_ns).sum::<u64>() as f64 / 1e9
}

fn seconds(moments: &Moments) -> f64 {
    moments.length() as f64 / 1e9
}

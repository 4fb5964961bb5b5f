//! Where a run's time went, from the traces of its ranks.
//!
//! Every moment of a step belongs to one component: to what the rank waits for if it waits, otherwise to what it
//! computes. So the components sum to the step, as predicted terms do. The rank with the most compute is used,
//! because predictions describe the slowest rank, and of its steps the middle half by duration.

use std::collections::BTreeMap;

use trainyard_mesh::{Axis, AxisSet, Mesh, MeshError};
use trainyard_trace::{Events, IntervalSet, Span, SpanKind};

use super::collective_time::{self, CollectiveTime};
use super::component::TimeComponent;
use super::measured::Measured;
use trainyard_plan::{Cluster, Degrees};

/// The step time of a run by component, and the times of its collectives.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceBreakdown {
    /// The rank whose time is broken down.
    pub rank: usize,
    /// Number of steps that were averaged.
    pub num_steps: usize,
    /// Collectives, one entry per axes, kind and size.
    pub collectives: Vec<CollectiveTime>,
    components: BTreeMap<TimeComponent, f64>,
}

/// Why traces do not match a plan.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum TraceError {
    /// There is no complete step.
    #[error("the traces contain no complete step: profile more steps")]
    Empty,
    /// A rank that the plan does not have.
    #[error(
        "the traces contain rank {rank}, but the plan has {world} ranks: the run used another plan"
    )]
    Rank {
        /// The rank.
        rank: usize,
        /// The plan's world size.
        world: usize,
    },
    /// A group of another size than in the plan.
    #[error(
        "{group} had {found} ranks, but in the plan it has {planned}: the run used another plan"
    )]
    Group {
        /// The group's axes.
        group: String,
        /// Its size in the trace.
        found: usize,
        /// Its size in the plan.
        planned: usize,
    },
    /// An invalid mesh.
    #[error(transparent)]
    Mesh(#[from] MeshError),
}

impl TraceBreakdown {
    /// Breaks down the traces of a run with this mesh.
    pub fn of(
        ranks: &[Events],
        degrees: &Degrees,
        cluster: &Cluster,
    ) -> Result<TraceBreakdown, TraceError> {
        let mesh = degrees.mesh()?;
        ranks
            .iter()
            .try_for_each(|events| check_groups(events, &mesh))?;
        let has_stages = mesh.size(Axis::Pp) > 1;
        let mean_step = ranks
            .iter()
            .filter_map(|events| mean_step(events, has_stages));
        let computing = |each: &TraceBreakdown| each.seconds(TimeComponent::Compute);
        let slowest = mean_step.max_by(|a, b| computing(a).total_cmp(&computing(b)));
        let slowest = slowest.ok_or(TraceError::Empty)?;
        Ok(TraceBreakdown {
            collectives: collective_time::times(ranks, &mesh, cluster),
            ..slowest
        })
    }

    /// Seconds of a component per step.
    pub fn seconds(&self, component: TimeComponent) -> f64 {
        self.components.get(&component).copied().unwrap_or(0.0)
    }

    /// Seconds of a step: the sum of all components.
    pub fn step(&self) -> f64 {
        self.components.values().sum()
    }

    /// Metrics derived from the traces, for runs without a metrics file.
    pub fn measured(&self) -> Measured {
        Measured {
            seconds: self.step(),
            num_steps: self.num_steps,
            ..Measured::default()
        }
    }
}

/// Checks that the trace's rank and groups match the mesh.
fn check_groups(events: &Events, mesh: &Mesh) -> Result<(), TraceError> {
    let (rank, world) = (events.rank, mesh.world_size());
    if rank >= world {
        return Err(TraceError::Rank { rank, world });
    }
    for each in &events.collectives {
        let Ok(axes) = each.group.parse::<AxisSet>() else {
            continue;
        };
        let (found, planned) = (each.group_size, mesh.size_of(axes));
        if found != planned {
            let group = each.group.clone();
            return Err(TraceError::Group {
                group,
                found,
                planned,
            });
        }
    }
    Ok(())
}

/// One rank's mean components over the middle half of its steps. The first step counts as warm-up and is skipped if
/// there are others.
fn mean_step(events: &Events, has_stages: bool) -> Option<TraceBreakdown> {
    let steps = events
        .spans
        .iter()
        .filter(|span| span.kind == SpanKind::Step);
    let mut steps: Vec<BTreeMap<TimeComponent, f64>> = steps
        .map(|step| components(events, step, has_stages))
        .collect();
    if steps.len() > 1 {
        steps.remove(0);
    }
    let length = |step: &BTreeMap<TimeComponent, f64>| step.values().sum::<f64>();
    steps.sort_by(|a, b| length(a).total_cmp(&length(b)));
    let quarter = steps.len() / 4;
    let middle = steps.get(quarter..steps.len() - quarter)?;
    if middle.is_empty() {
        return None;
    }
    let mut mean = BTreeMap::new();
    for (component, seconds) in middle.iter().flatten() {
        *mean.entry(*component).or_insert(0.0) += seconds / middle.len() as f64;
    }
    Some(TraceBreakdown {
        rank: events.rank,
        num_steps: middle.len(),
        collectives: Vec::new(),
        components: mean,
    })
}

/// The components of one step, every moment counted once.
fn components(events: &Events, step: &Span, has_stages: bool) -> BTreeMap<TimeComponent, f64> {
    let within: IntervalSet = [(step.started_ns, step.ended_ns)].into_iter().collect();
    let mut waits: BTreeMap<TimeComponent, Vec<(u64, u64)>> = BTreeMap::new();
    for each in &events.collectives {
        let wait = each.waited.into_iter();
        waits
            .entry(TimeComponent::of_wait(each, has_stages))
            .or_default()
            .extend(wait);
    }
    let spans = |is: fn(SpanKind) -> bool| {
        let spans = events.spans.iter().filter(move |span| is(span.kind));
        spans.map(|span| (span.started_ns, span.ended_ns)).collect()
    };
    let computing: [(TimeComponent, Vec<(u64, u64)>); 2] = [
        (
            TimeComponent::Optimizer,
            spans(|kind| kind == SpanKind::Optimizer),
        ),
        (TimeComponent::Compute, spans(SpanKind::is_compute)),
    ];
    let mut left = within;
    let mut breakdown = BTreeMap::new();
    for (component, intervals) in waits.into_iter().chain(computing) {
        let all: IntervalSet = intervals.into_iter().collect();
        breakdown.insert(component, seconds(&left.intersection(&all)));
        left = left.difference(&all);
    }
    breakdown.insert(TimeComponent::Other, seconds(&left));
    breakdown.insert(TimeComponent::DataLoading, data_loading(events, step));
    breakdown
}

/// Waiting for the step's samples, which happens between the previous step and this one.
fn data_loading(events: &Events, step: &Span) -> f64 {
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

fn seconds(intervals: &IntervalSet) -> f64 {
    intervals.duration() as f64 / 1e9
}

//! How long a run's collectives took, which is what constants of wires are fitted to.
//!
//! A rank that comes early waits in the collective for the others, so of one collective the time of the rank
//! that was quickest counts: it came last. A collective that began while another was under way shared the
//! wires with it; its time is what it took beyond that one's end.

use std::collections::BTreeMap;
use std::fmt;

use trainyard_mesh::{AxisSet, Mesh};
use trainyard_trace::{Collective, CollectiveKind, Events, Purpose, readable_bytes};

use crate::{Cluster, Group, Wires};

/// Collectives of one kind and size along the same axes.
#[derive(Clone, Debug, PartialEq)]
pub struct WireTime {
    /// Along which axes.
    pub axes: String,
    /// What they did.
    pub kind: CollectiveKind,
    /// How the group lies on machines.
    pub group: Group,
    /// Bytes that a rank sends.
    pub sent_bytes: u64,
    /// How many were seen.
    pub count: usize,
    /// Seconds of one: the median.
    pub seconds: f64,
}

impl WireTime {
    /// What one is priced at.
    pub fn predicted(&self, wires: &Wires<'_>) -> f64 {
        let size = self.group.size as f64;
        let once = self.sent_bytes as f64 * size / (size - 1.0);
        match self.kind {
            CollectiveKind::AllReduce => wires.all_reduce(self.group, once / 2.0),
            CollectiveKind::AllToAll => wires.all_to_all(self.group, once),
            _ => wires.gather(self.group, once),
        }
    }
}

impl fmt::Display for WireTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = readable_bytes(self.sent_bytes);
        write!(
            f,
            "{} {} of {bytes}, {} times",
            self.axes, self.kind, self.count
        )
    }
}

/// Whether the time between its begin and its end is that of bytes on wires. Messages between two ranks
/// are not: they end when somebody asks.
fn is_timed(collective: &Collective) -> bool {
    let kinds = [
        CollectiveKind::AllReduce,
        CollectiveKind::AllGather,
        CollectiveKind::ReduceScatter,
        CollectiveKind::AllToAll,
    ];
    kinds.contains(&collective.kind)
        && collective.purpose != Purpose::Control
        && collective.group_size > 1
        && collective.sent_bytes > 0
}

/// One collective of one group, on all its ranks.
type Act<'a> = (&'a str, usize, u64);
/// Axes, kind, how many ranks share a machine, bytes sent.
type Class<'a> = (&'a str, CollectiveKind, usize, u64);

/// The times of all collectives, by axes, kind and size.
pub(super) fn times(ranks: &[Events], mesh: &Mesh, cluster: &Cluster) -> Vec<WireTime> {
    let mut acts: BTreeMap<Act<'_>, (Class<'_>, f64)> = BTreeMap::new();
    for events in ranks {
        for (each, seconds) in apart(&events.collectives) {
            let Some((first, in_machine)) = lies(each, events.rank, mesh, cluster) else {
                continue;
            };
            let class = (each.group.as_str(), each.kind, in_machine, each.sent_bytes);
            let act = (each.group.as_str(), first, each.sequence);
            let entry = acts.entry(act).or_insert((class, f64::INFINITY));
            entry.1 = entry.1.min(seconds);
        }
    }
    let mut classes: BTreeMap<Class<'_>, Vec<f64>> = BTreeMap::new();
    for (class, seconds) in acts.into_values().filter(|(_, seconds)| *seconds > 0.0) {
        classes.entry(class).or_default().push(seconds);
    }
    let times = classes.into_iter().map(|(class, mut seconds)| {
        let (axes, kind, in_machine, sent_bytes) = class;
        seconds.sort_by(f64::total_cmp);
        let size = axes
            .parse()
            .map_or(in_machine, |axes: AxisSet| mesh.size_of(axes));
        WireTime {
            axes: axes.to_owned(),
            kind,
            group: Group { size, in_machine },
            sent_bytes,
            count: seconds.len(),
            seconds: seconds[seconds.len() / 2],
        }
    });
    times.collect()
}

/// What each collective took beyond the end of those before it.
fn apart(collectives: &[Collective]) -> impl Iterator<Item = (&Collective, f64)> {
    let mut ordered: Vec<&Collective> = collectives.iter().filter(|each| is_timed(each)).collect();
    ordered.sort_by_key(|each| each.started_ns);
    let mut free_ns = 0;
    ordered.into_iter().map(move |each| {
        let took = each.ended_ns.saturating_sub(each.started_ns.max(free_ns));
        free_ns = free_ns.max(each.ended_ns);
        (each, took as f64 / 1e9)
    })
}

/// The first rank of the collective's group, and how many of its ranks share a machine.
fn lies(
    collective: &Collective,
    rank: usize,
    mesh: &Mesh,
    cluster: &Cluster,
) -> Option<(usize, usize)> {
    let axes: AxisSet = collective.group.parse().ok()?;
    let members = mesh.group(rank, axes).ok()?;
    let machine = |rank: usize| rank / cluster.per_machine.max(1);
    let first = *members.first()?;
    let beside = members
        .iter()
        .filter(|member| machine(**member) == machine(first));
    Some((first, beside.count()))
}

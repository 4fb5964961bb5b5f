//! What the Flight Recorder dumps of all ranks say about a run that hangs.
//!
//! All members of a group must call the same collectives in the same order. For every group, the earliest
//! collective that is not complete everywhere tells who waits for whom, and the earliest one that the members
//! call differently tells where the program went wrong.

use std::collections::{BTreeMap, BTreeSet};

use crate::CollectiveKind;

use super::{
    flight_recorder::{FlightRecorder, GroupId, RecordedCall},
    wording::{Caller, Operation, Places, Ranks, Shapes},
};

/// The number of a collective in its group, and the position among those with the same number: operations that
/// start together share it.
type Number = (u64, usize);

/// Of so many ranks that did not enter a collective, a finding tells what they did last.
const MAX_LAST_CALLS: usize = 4;

/// The calls of one rank in one group, in order.
type Calls<'a> = BTreeMap<Number, &'a RecordedCall>;

/// Finds out why ranks wait, from the dumps of all ranks: sentences, that of the longest wait first. Empty if
/// everything is complete.
pub fn diagnose(dumps: &[FlightRecorder]) -> Vec<String> {
    let mut findings: Vec<Finding> = groups(dumps)
        .into_iter()
        .flat_map(|(id, ranks)| Group::new(id, ranks, dumps).findings())
        .chain(dumps.iter().filter_map(point_to_point))
        .collect();
    findings.sort();
    findings.into_iter().map(Finding::into_text).collect()
}

/// A sentence, and since when it has been true.
#[derive(Eq, Ord, PartialEq, PartialOrd)]
struct Finding {
    since_ns: u64,
    text: String,
}

impl Finding {
    /// The sentence without control characters, which names in a file must not bring into a terminal.
    fn into_text(self) -> String {
        self.text
            .chars()
            .filter(|each| !each.is_control())
            .collect()
    }
}

/// The collectives of every group by rank.
fn groups(dumps: &[FlightRecorder]) -> BTreeMap<&GroupId, BTreeMap<usize, Calls<'_>>> {
    let mut groups = BTreeMap::<&GroupId, BTreeMap<usize, Calls>>::new();
    for dump in dumps {
        let collectives = |call: &&RecordedCall| !call.collective.kind.is_point_to_point();
        for call in dump.calls.iter().filter(collectives) {
            let ranks = groups.entry(&call.group).or_default();
            insert(ranks.entry(dump.rank).or_default(), call);
        }
    }
    groups
}

fn insert<'a>(calls: &mut Calls<'a>, call: &'a RecordedCall) {
    let sequence = call.collective.sequence;
    let mut same = calls.range((sequence, 0)..=(sequence, usize::MAX));
    let position = same.next_back().map_or(0, |((_, last), _)| last + 1);
    calls.insert((sequence, position), call);
}

/// The earliest send or receive of a rank that is not complete.
fn point_to_point(dump: &FlightRecorder) -> Option<Finding> {
    let call = dump
        .incomplete()
        .find(|call| call.collective.kind.is_point_to_point())?;
    let peers = call.peers.as_deref().unwrap_or_default();
    Some(Finding {
        since_ns: call.collective.issued_ns,
        text: format!(
            "rank {} waits in {}{}{peers}{}",
            dump.rank,
            Operation(call),
            if peers.is_empty() {
                ""
            } else {
                ", ranks of the group "
            },
            Caller(call)
        ),
    })
}

/// The dumps' view of one group.
struct Group<'a> {
    ranks: BTreeMap<usize, Calls<'a>>,
    /// All members that are known, with or without a dump.
    members: BTreeSet<usize>,
    with_dump: BTreeSet<usize>,
}

impl<'a> Group<'a> {
    fn new(id: &GroupId, ranks: BTreeMap<usize, Calls<'a>>, dumps: &[FlightRecorder]) -> Group<'a> {
        let with_dump: BTreeSet<usize> = dumps.iter().map(|dump| dump.rank).collect();
        let mut members: BTreeSet<usize> = id.members.iter().copied().collect();
        members.extend(ranks.keys());
        // A dump of Gloo does not have the members; every rank is one of the default group.
        if id.members.is_empty() && id.is_default() {
            members.extend(&with_dump);
        }
        Group {
            ranks,
            members,
            with_dump,
        }
    }

    fn findings(&self) -> Vec<Finding> {
        let mismatch = self.mismatch();
        let waiting = self.waiting();
        mismatch.into_iter().chain(waiting).collect()
    }

    /// The calls with a number, by rank.
    fn at(&self, number: Number) -> Vec<(usize, &'a RecordedCall)> {
        let call = |(&rank, calls): (&usize, &Calls<'a>)| Some((rank, *calls.get(&number)?));
        self.ranks.iter().filter_map(call).collect()
    }

    /// The earliest collective that is not complete on some rank.
    fn waiting(&self) -> Option<Finding> {
        let incomplete = |calls: &Calls<'a>| {
            let first = calls.iter().find(|(_, call)| !call.is_complete);
            first.map(|(&number, _)| number)
        };
        let number = self.ranks.values().filter_map(incomplete).min()?;
        let waiting: Vec<_> = self
            .at(number)
            .into_iter()
            .filter(|(_, call)| !call.is_complete)
            .collect();
        let (_, first) = waiting.first()?;
        let waits = Places::of(&waiting, "waits", "wait");
        let operation = Operation(first);
        let absent = self.absent(number);
        let unknown: Vec<usize> = self.members.difference(&self.with_dump).copied().collect();
        let mut text = if absent.is_empty() {
            format!("{operation} is not complete; {waits}")
        } else {
            format!("{} did not enter {operation}; {waits}", Ranks(&absent))
        };
        for &rank in absent.iter().take(MAX_LAST_CALLS) {
            text.push_str(&self.last_call(rank));
        }
        if !unknown.is_empty() {
            text.push_str(&format!("; there is no dump of {}", Ranks(&unknown)));
        }
        Some(Finding {
            since_ns: waiting
                .iter()
                .map(|(_, call)| call.collective.issued_ns)
                .min()?,
            text,
        })
    }

    /// The members whose last collective comes before the given one. A member without this collective but with
    /// later ones has overwritten it in its ring buffer.
    fn absent(&self, number: Number) -> Vec<usize> {
        let last = |rank: &usize| {
            self.ranks
                .get(rank)?
                .last_key_value()
                .map(|(&last, _)| last)
        };
        self.members
            .intersection(&self.with_dump)
            .copied()
            .filter(|rank| last(rank).is_none_or(|last| last < number))
            .collect()
    }

    fn last_call(&self, rank: usize) -> String {
        let last = self.ranks.get(&rank).and_then(Calls::last_key_value);
        let Some((_, call)) = last else {
            return format!("; rank {rank} recorded nothing in this group");
        };
        let collective = &call.collective;
        let (kind, sequence) = (collective.kind, collective.sequence);
        format!(
            "; the last one of rank {rank} is {kind} {sequence}{}",
            Caller(call)
        )
    }

    /// The earliest collective that the ranks call with different operations, shapes or types.
    fn mismatch(&self) -> Option<Finding> {
        let numbers: BTreeSet<Number> =
            self.ranks.values().flat_map(Calls::keys).copied().collect();
        numbers
            .into_iter()
            .find_map(|number| self.mismatch_at(number))
    }

    fn mismatch_at(&self, number: Number) -> Option<Finding> {
        let calls = self.at(number);
        let (_, first) = calls.first()?;
        if calls
            .iter()
            .all(|(_, call)| Signature::of(first).agrees(&Signature::of(call)))
        {
            return None;
        }
        let mut by_operation = BTreeMap::<String, Vec<(usize, &RecordedCall)>>::new();
        for &(rank, call) in &calls {
            let what = format!("{}{}", call.collective.kind, Shapes(call));
            by_operation.entry(what).or_default().push((rank, call));
        }
        let mut sides: Vec<_> = by_operation.iter().collect();
        sides.sort_by_key(|(_, calls)| calls.first().map(|&(rank, _)| rank));
        let sides: Vec<String> = sides
            .into_iter()
            .map(|(what, calls)| {
                Places::of(calls, &format!("calls {what}"), &format!("call {what}")).to_string()
            })
            .collect();
        Some(Finding {
            since_ns: calls
                .iter()
                .map(|(_, call)| call.collective.issued_ns)
                .min()?,
            text: format!(
                "the ranks disagree on collective {} of {}: {}",
                number.0,
                first.collective.group,
                sides.join("; ")
            ),
        })
    }
}

/// What all ranks of a collective must agree on.
struct Signature<'a> {
    kind: CollectiveKind,
    dtype: Option<&'a str>,
    shapes: Option<&'a [Vec<i64>]>,
}

impl<'a> Signature<'a> {
    fn of(call: &'a RecordedCall) -> Signature<'a> {
        let kind = call.collective.kind;
        let shapes_agree = matches!(
            kind,
            CollectiveKind::AllReduce
                | CollectiveKind::AllGather
                | CollectiveKind::ReduceScatter
                | CollectiveKind::Broadcast
                | CollectiveKind::Reduce
        );
        // Only the root of a scatter has an input, and an empty one may have any type.
        let has_input = call.collective.payload_bytes > 0 && kind != CollectiveKind::Scatter;
        Signature {
            kind,
            dtype: has_input.then_some(&call.collective.dtype),
            shapes: shapes_agree.then_some(&call.shapes),
        }
    }

    fn agrees(&self, other: &Signature) -> bool {
        let dtypes = self.dtype.zip(other.dtype);
        let shapes = self.shapes.zip(other.shapes);
        self.kind == other.kind
            && dtypes.is_none_or(|(left, right)| left == right)
            && shapes.is_none_or(|(left, right)| left == right)
    }
}

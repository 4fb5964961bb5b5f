//! Summary of a run's time: compute, hidden and exposed communication.
//!
//! Communication is hidden while the rank computes and no thread blocks in `wait`; the rest is exposed.
//! Collectives overlap, so every time is the duration of a union of intervals, and the times of all kinds
//! may add up to more than the time of their rank.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use serde::Serialize;

use crate::{
    CollectiveKind, Events, FlightRecorder, SpanKind, TraceError, diagnose,
    interval_set::IntervalSet,
    pytorch::count_members,
    trace_file::{TraceFile, files_of, read_trace_file},
};

/// Collectives of one kind.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize)]
pub struct KindSummary {
    /// The number of collectives.
    pub count: u64,
    /// The size of the inputs.
    pub payload_bytes: u64,
    /// The bytes sent over the network.
    pub sent_bytes: u64,
    /// The time during which at least one was in progress.
    pub communication_ns: u64,
    /// The part of that time which was hidden behind compute.
    pub hidden_ns: u64,
    /// The part of that time which was not hidden.
    pub exposed_ns: u64,
}

/// The time of one rank.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize)]
pub struct RankSummary {
    /// The rank.
    pub rank: usize,
    /// The number of training steps.
    pub num_steps: u64,
    /// The time from the first to the last event.
    pub wall_ns: u64,
    /// The time in forward, backward, optimizer and compute spans.
    pub compute_ns: u64,
    /// The part of the compute time during which no thread blocked in `wait`.
    pub busy_ns: u64,
    /// The time during which at least one collective was in progress.
    pub communication_ns: u64,
    /// The part of the communication time which was hidden behind compute.
    pub hidden_ns: u64,
    /// The part of the communication time which was not hidden.
    pub exposed_ns: u64,
    /// Communication by kind of collective.
    pub kinds: BTreeMap<CollectiveKind, KindSummary>,
}

/// The time of a run by rank. Its `Display` is a table.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize)]
pub struct Summary {
    /// All ranks, in ascending order.
    pub ranks: Vec<RankSummary>,
    /// Totals of all ranks by kind of collective.
    pub kinds: BTreeMap<CollectiveKind, KindSummary>,
    /// The straggler: the rank that was busy longest, for which the others wait. `None` if no rank computed.
    pub slowest_rank: Option<usize>,
    /// Why ranks wait, from dumps of PyTorch's Flight Recorder, see [`diagnose`].
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub findings: Vec<String>,
}

/// Summarizes traces. Each path is a trace file, or a directory with one file per rank. The formats are those
/// of [`read_all`].
pub fn summarize<P: AsRef<Path>>(
    paths: impl IntoIterator<Item = P>,
) -> Result<Summary, TraceError> {
    let (ranks, dumps) = read_with_dumps(paths)?;
    Ok(Summary {
        findings: diagnose(&dumps),
        ..Summary::of(&ranks)
    })
}

/// Reads the events of all ranks, in order of rank. Each path is a trace file, or a directory with one file
/// per rank: traces written by Trainyard or by PyTorch's profiler, or dumps of PyTorch's Flight Recorder.
pub fn read_all<P: AsRef<Path>>(
    paths: impl IntoIterator<Item = P>,
) -> Result<Vec<Events>, TraceError> {
    read_with_dumps(paths).map(|(ranks, _)| ranks)
}

/// The events of all ranks, and the dumps among the files.
fn read_with_dumps<P: AsRef<Path>>(
    paths: impl IntoIterator<Item = P>,
) -> Result<(Vec<Events>, Vec<FlightRecorder>), TraceError> {
    let mut run = Run::default();
    for path in paths {
        run.read(path.as_ref())?;
    }
    Ok(run.finish())
}

/// The ranks of a run that have been read, with the file of each.
#[derive(Default)]
struct Run {
    ranks: BTreeMap<usize, (PathBuf, Events)>,
    dumps: Vec<FlightRecorder>,
}

impl Run {
    /// Reads a file, or those of a directory.
    fn read(&mut self, path: &Path) -> Result<(), TraceError> {
        let num_before = self.ranks.len();
        for file in files_of(path)? {
            match read_trace_file(&file.path) {
                Err(TraceError::UnknownFormat { .. }) if file.is_guess => {}
                content => self.add(&file.path, content?)?,
            }
        }
        if self.ranks.len() == num_before {
            return Err(TraceError::Empty {
                path: path.to_owned(),
            });
        }
        Ok(())
    }

    fn add(&mut self, file: &Path, content: TraceFile) -> Result<(), TraceError> {
        match content {
            TraceFile::Events(found) => found
                .into_iter()
                .try_for_each(|events| self.insert(file, events)),
            TraceFile::Dump(dump) => {
                let events = dump.events();
                self.dumps.push(dump);
                self.insert(file, events)
            }
        }
    }

    fn insert(&mut self, file: &Path, events: Events) -> Result<(), TraceError> {
        let rank = events.rank;
        match self.ranks.insert(rank, (file.to_owned(), events)) {
            None => Ok(()),
            Some((first, _)) => Err(TraceError::DuplicateRank {
                rank,
                first,
                second: file.to_owned(),
            }),
        }
    }

    /// The events of all ranks and the dumps. Only the dumps of all ranks tell the sizes of some groups.
    fn finish(mut self) -> (Vec<Events>, Vec<FlightRecorder>) {
        count_members(&mut self.dumps);
        for dump in &self.dumps {
            if let Some((_, events)) = self.ranks.get_mut(&dump.rank) {
                *events = dump.events();
            }
        }
        let ranks = self.ranks.into_values().map(|(_, events)| events);
        (ranks.collect(), self.dumps)
    }
}

impl Summary {
    /// Summarizes the events of all ranks.
    pub fn of(ranks: &[Events]) -> Summary {
        Summary::from_ranks(ranks.iter().map(RankSummary::of).collect())
    }

    fn from_ranks(mut ranks: Vec<RankSummary>) -> Summary {
        ranks.sort_by_key(|each| each.rank);
        let mut kinds = BTreeMap::<_, KindSummary>::new();
        for (&kind, each) in ranks.iter().flat_map(|rank| &rank.kinds) {
            kinds.entry(kind).or_default().add(each);
        }
        let slowest_rank = ranks
            .iter()
            .filter(|each| each.busy_ns > 0)
            .max_by_key(|each| (each.busy_ns, std::cmp::Reverse(each.rank)))
            .map(|each| each.rank);
        Summary {
            ranks,
            kinds,
            slowest_rank,
            findings: Vec::new(),
        }
    }
}

impl RankSummary {
    /// Summarizes the events of one rank.
    pub fn of(events: &Events) -> RankSummary {
        let compute: IntervalSet = events
            .spans
            .iter()
            .filter(|span| span.kind.is_compute())
            .map(|span| (span.started_ns, span.ended_ns))
            .collect();
        let waits: IntervalSet = events
            .collectives
            .iter()
            .filter_map(|each| each.waited)
            .collect();
        let busy = compute.difference(&waits);
        let (communication, hidden) = communication_ns(events, &busy, |_| true);
        RankSummary {
            rank: events.rank,
            num_steps: events
                .spans
                .iter()
                .filter(|span| span.kind == SpanKind::Step)
                .count() as u64,
            wall_ns: wall_ns(events),
            compute_ns: compute.duration(),
            busy_ns: busy.duration(),
            communication_ns: communication,
            hidden_ns: hidden,
            exposed_ns: communication - hidden,
            kinds: kinds_of(events, &busy),
        }
    }
}

impl KindSummary {
    fn add(&mut self, other: &KindSummary) {
        self.count += other.count;
        self.payload_bytes += other.payload_bytes;
        self.sent_bytes += other.sent_bytes;
        self.communication_ns += other.communication_ns;
        self.hidden_ns += other.hidden_ns;
        self.exposed_ns += other.exposed_ns;
    }
}

/// The time during which a collective of a matching kind was in progress, and the part of it during which the
/// rank was busy.
fn communication_ns(
    events: &Events,
    busy: &IntervalSet,
    matches: impl Fn(CollectiveKind) -> bool,
) -> (u64, u64) {
    let communication: IntervalSet = events
        .collectives
        .iter()
        .filter(|each| matches(each.kind))
        .map(|each| (each.started_ns, each.ended_ns))
        .collect();
    let hidden = communication.intersection(busy);
    (communication.duration(), hidden.duration())
}

fn kinds_of(events: &Events, busy: &IntervalSet) -> BTreeMap<CollectiveKind, KindSummary> {
    let mut kinds = BTreeMap::<CollectiveKind, KindSummary>::new();
    for each in &events.collectives {
        let kind = kinds.entry(each.kind).or_default();
        kind.count += 1;
        kind.payload_bytes += each.payload_bytes;
        kind.sent_bytes += each.sent_bytes;
    }
    for (&kind, summary) in &mut kinds {
        let (communication, hidden) = communication_ns(events, busy, |each| each == kind);
        summary.communication_ns = communication;
        summary.hidden_ns = hidden;
        summary.exposed_ns = communication - hidden;
    }
    kinds
}

fn wall_ns(events: &Events) -> u64 {
    let spans = events
        .spans
        .iter()
        .map(|each| (each.started_ns, each.ended_ns));
    let collectives = events
        .collectives
        .iter()
        .map(|each| (each.started_ns, each.ended_ns));
    let operators = events
        .operators
        .iter()
        .map(|each| (each.started_ns, each.ended_ns));
    let (first, last) = spans
        .chain(collectives)
        .chain(operators)
        .fold((u64::MAX, 0), |(first, last), (start, end)| {
            (first.min(start), last.max(end))
        });
    last.saturating_sub(first)
}

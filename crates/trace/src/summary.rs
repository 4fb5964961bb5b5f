//! Where a run's time went.
//!
//! Communication costs only what computing does not hide. It is hidden while the rank computes and
//! nobody stands in `wait`; the rest is exposed. Collectives overlap, so every figure is the length
//! of a set of moments, and the figures of kinds may add up to more than those of their rank.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use serde::Serialize;

use crate::{CollectiveKind, Events, SpanKind, TraceError, interval::Moments, read_chrome};

/// Collectives of one kind.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize)]
pub struct KindSummary {
    /// How many there were.
    pub count: u64,
    /// The bytes handed in.
    pub payload_bytes: u64,
    /// The bytes put on the wire.
    pub sent_bytes: u64,
    /// How long some were under way.
    pub communication_ns: u64,
    /// The part of it behind which the rank computed.
    pub hidden_ns: u64,
    /// The rest.
    pub exposed_ns: u64,
}

/// One rank's time.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize)]
pub struct RankSummary {
    /// The rank.
    pub rank: usize,
    /// How many steps it made.
    pub num_steps: u64,
    /// From its first event to its last.
    pub wall_ns: u64,
    /// In forward, backward and optimiser.
    pub compute_ns: u64,
    /// The part of it in which nobody stood in `wait`.
    pub busy_ns: u64,
    /// How long some collective was under way.
    pub communication_ns: u64,
    /// The part of it behind which the rank computed.
    pub hidden_ns: u64,
    /// The rest.
    pub exposed_ns: u64,
    /// The same by kind of collective.
    pub kinds: BTreeMap<CollectiveKind, KindSummary>,
}

/// A run's time, rank by rank. Printed as a table.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize)]
pub struct Summary {
    /// Every rank, ascending.
    pub ranks: Vec<RankSummary>,
    /// All ranks together, by kind of collective.
    pub kinds: BTreeMap<CollectiveKind, KindSummary>,
    /// The rank that was busy longest, if any computed: in step with each other, the others wait
    /// for it.
    pub slowest_rank: Option<usize>,
}

/// Summarises traces: files, or folders with a file per rank.
pub fn summarize<P: AsRef<Path>>(
    paths: impl IntoIterator<Item = P>,
) -> Result<Summary, TraceError> {
    Ok(Summary::of(&read_all(paths)?))
}

/// The events of every rank, in order of rank: from files, or folders with a file per rank.
pub fn read_all<P: AsRef<Path>>(
    paths: impl IntoIterator<Item = P>,
) -> Result<Vec<Events>, TraceError> {
    let mut ranks: BTreeMap<usize, (PathBuf, Events)> = BTreeMap::new();
    for path in paths {
        for file in files_of(path.as_ref())? {
            let found = read_chrome(&file)?;
            if found.is_empty() {
                return Err(TraceError::Empty { path: file });
            }
            for events in found {
                let rank = events.rank;
                if let Some((first, _)) = ranks.insert(rank, (file.clone(), events)) {
                    return Err(TraceError::DuplicateRank {
                        rank,
                        first,
                        second: file,
                    });
                }
            }
        }
    }
    Ok(ranks.into_values().map(|(_, events)| events).collect())
}

impl Summary {
    /// Summarises events that are at hand.
    pub fn of(ranks: &[Events]) -> Summary {
        Summary::over(ranks.iter().map(RankSummary::of).collect())
    }

    fn over(mut ranks: Vec<RankSummary>) -> Summary {
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
        }
    }
}

impl RankSummary {
    /// Summarises one rank.
    pub fn of(events: &Events) -> RankSummary {
        let compute: Moments = events
            .spans
            .iter()
            .filter(|span| span.kind.is_compute())
            .map(|span| (span.started_ns, span.ended_ns))
            .collect();
        let waits: Moments = events
            .collectives
            .iter()
            .filter_map(|each| each.waited)
            .collect();
        let busy = compute.without(&waits);
        let (communication, hidden) = under_way(events, &busy, |_| true);
        RankSummary {
            rank: events.rank,
            num_steps: events
                .spans
                .iter()
                .filter(|span| span.kind == SpanKind::Step)
                .count() as u64,
            wall_ns: wall_ns(events),
            compute_ns: compute.length(),
            busy_ns: busy.length(),
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

/// How long collectives of some kinds were under way, and how long of that the rank was busy.
fn under_way(
    events: &Events,
    busy: &Moments,
    holds: impl Fn(CollectiveKind) -> bool,
) -> (u64, u64) {
    let communication: Moments = events
        .collectives
        .iter()
        .filter(|each| holds(each.kind))
        .map(|each| (each.started_ns, each.ended_ns))
        .collect();
    (communication.length(), communication.and(busy).length())
}

fn kinds_of(events: &Events, busy: &Moments) -> BTreeMap<CollectiveKind, KindSummary> {
    let mut kinds = BTreeMap::<CollectiveKind, KindSummary>::new();
    for each in &events.collectives {
        let kind = kinds.entry(each.kind).or_default();
        kind.count += 1;
        kind.payload_bytes += each.payload_bytes;
        kind.sent_bytes += each.sent_bytes;
    }
    for (&kind, summary) in &mut kinds {
        let (communication, hidden) = under_way(events, busy, |each| each == kind);
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

/// The files to read: the path itself, or the files of ranks in the folder.
fn files_of(path: &Path) -> Result<Vec<PathBuf>, TraceError> {
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let unreadable = |source| TraceError::Read {
        path: path.to_owned(),
        source,
    };
    let mut files = Vec::new();
    for entry in fs::read_dir(path).map_err(unreadable)? {
        let name = entry.map_err(unreadable)?.file_name();
        if let Some(rank) = name.to_str().and_then(rank_of) {
            files.push((rank, path.join(name)));
        }
    }
    if files.is_empty() {
        return Err(TraceError::Empty {
            path: path.to_owned(),
        });
    }
    files.sort();
    Ok(files.into_iter().map(|(_, file)| file).collect())
}

/// The inverse of [`chrome_file_name`](crate::chrome_file_name).
fn rank_of(file_name: &str) -> Option<usize> {
    file_name
        .strip_prefix("rank")?
        .strip_suffix(".json")?
        .parse()
        .ok()
}

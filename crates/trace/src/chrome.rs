//! Writing and reading traces in Chrome's trace event format, for Perfetto and `chrome://tracing`.
//!
//! Every rank is a process. Its threads are the rank's threads, tracks of collectives, tracks of waits, and
//! a memory counter. The `args` of an event hold the complete event, so reading needs only those; `ts`,
//! `dur` and `tid` are for the viewer.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io::{self, BufWriter, Write},
    path::Path,
};

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::{Value, json};

use crate::{Allocation, Collective, Events, MemoryKind, Operator, Purpose, Span, TraceError};

/// The granularity of a trace's time origin, about a day. Viewers store microseconds as doubles; times
/// relative to a recent origin keep nanoseconds exact, and all ranks of a run get the same origin.
const ORIGIN_STEP_NS: u64 = 100_000_000_000_000;

/// The first thread ids of the tracks of collectives and of waits.
const COMMUNICATION: u64 = 1 << 20;
const WAITING: u64 = 1 << 21;

/// The file name of a rank's trace.
pub fn chrome_file_name(rank: usize) -> String {
    format!("rank{rank}.json")
}

/// Writes the events of one or several ranks into one file. Creates its directory if needed.
pub fn write_chrome(path: impl AsRef<Path>, ranks: &[Events]) -> Result<(), TraceError> {
    let path = path.as_ref();
    let write = || -> io::Result<()> {
        if let Some(dir) = path.parent() {
            fs::create_dir_all(dir)?;
        }
        let mut file = BufWriter::new(File::create(path)?);
        write_ranks(&mut file, ranks)?;
        file.flush()
    };
    write().map_err(|source| TraceError::Write {
        path: path.to_owned(),
        source,
    })
}

/// Reads the events of all ranks of a file, in ascending order. Ignores events of other programs.
pub fn read_chrome(path: impl AsRef<Path>) -> Result<Vec<Events>, TraceError> {
    let path = path.as_ref();
    let bytes = fs::read(path).map_err(|source| TraceError::Read {
        path: path.to_owned(),
        source,
    })?;
    read_chrome_text(path, &bytes)
}

/// Reads the events of all ranks from the content of a file.
pub(crate) fn read_chrome_text(path: &Path, bytes: &[u8]) -> Result<Vec<Events>, TraceError> {
    read_ranks(bytes).map_err(|source| TraceError::Format {
        path: path.to_owned(),
        source,
    })
}

/// One event of the trace event format.
#[derive(Serialize)]
struct Line<'a, A> {
    name: Cow<'a, str>,
    cat: &'a str,
    ph: &'a str,
    ts: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    dur: Option<f64>,
    pid: usize,
    tid: u64,
    args: A,
}

fn write_ranks(out: &mut impl Write, ranks: &[Events]) -> io::Result<()> {
    let first = ranks.iter().filter_map(first_ns).min().unwrap_or(0);
    let origin = first - first % ORIGIN_STEP_NS;
    writeln!(
        out,
        r#"{{"displayTimeUnit":"ms","baseTimeNanoseconds":{origin},"traceEvents":["#
    )?;
    let mut lines = Lines {
        out,
        origin,
        is_first: true,
    };
    for rank in ranks {
        lines.rank(rank)?;
    }
    writeln!(lines.out, "\n]}}")
}

fn first_ns(events: &Events) -> Option<u64> {
    let collectives = events
        .collectives
        .iter()
        .map(|each| each.issued_ns.min(each.started_ns));
    let spans = events.spans.iter().map(|each| each.started_ns);
    let operators = events.operators.iter().map(|each| each.started_ns);
    let allocations = events.allocations.iter().map(|each| each.at_ns);
    collectives
        .chain(spans)
        .chain(operators)
        .chain(allocations)
        .min()
}

/// The title of a collective in the viewer: its kind, or its purpose where that is more specific.
fn title(each: &Collective) -> String {
    let what = match each.purpose {
        Purpose::Dispatch | Purpose::Combine => each.purpose.name(),
        _ => each.kind.name(),
    };
    format!("{what} {} #{}", each.group, each.sequence)
}

/// A writer of the array of events.
struct Lines<'a, W> {
    out: &'a mut W,
    origin: u64,
    is_first: bool,
}

impl<W: Write> Lines<'_, W> {
    fn rank(&mut self, events: &Events) -> io::Result<()> {
        let pid = events.rank;
        self.meta(
            pid,
            0,
            "process_name",
            json!({ "name": format!("rank {pid}") }),
        )?;
        self.meta(pid, 0, "process_sort_index", json!({ "sort_index": pid }))?;
        self.threads(events)?;
        for span in &events.spans {
            let times = (span.started_ns, span.ended_ns);
            self.slice(
                pid,
                thread_id(span.thread),
                "span",
                (&span.name).into(),
                times,
                span,
            )?;
        }
        for operator in &events.operators {
            let times = (operator.started_ns, operator.ended_ns);
            let name = Cow::from(&operator.name);
            self.slice(
                pid,
                thread_id(operator.thread),
                "operator",
                name,
                times,
                operator,
            )?;
        }
        self.collectives(pid, &events.collectives)?;
        self.waits(pid, &events.collectives)?;
        self.allocations(pid, &events.allocations)
    }

    fn threads(&mut self, events: &Events) -> io::Result<()> {
        let spans = events.spans.iter().map(|span| span.thread);
        let operators = events.operators.iter().map(|operator| operator.thread);
        let compute: BTreeSet<u64> = events
            .spans
            .iter()
            .filter(|span| span.kind.is_compute())
            .map(|span| span.thread)
            .collect();
        for thread in spans.chain(operators).collect::<BTreeSet<u64>>() {
            let role = if compute.contains(&thread) {
                "compute"
            } else {
                "thread"
            };
            self.thread(events.rank, thread_id(thread), format!("{role} {thread}"))?;
        }
        Ok(())
    }

    fn collectives(&mut self, pid: usize, collectives: &[Collective]) -> io::Result<()> {
        let times = |each: &Collective| (each.started_ns, each.ended_ns);
        let lanes = lanes(collectives.iter().map(times));
        self.lane_names(pid, COMMUNICATION, "communication", &lanes)?;
        for (each, lane) in collectives.iter().zip(lanes) {
            let name = title(each);
            let tid = COMMUNICATION + lane;
            self.slice(pid, tid, "collective", name.into(), times(each), each)?;
        }
        Ok(())
    }

    /// Waits are written for the viewer only; reading takes them from the collectives.
    fn waits(&mut self, pid: usize, collectives: &[Collective]) -> io::Result<()> {
        let waits: Vec<(&Collective, (u64, u64))> = collectives
            .iter()
            .filter_map(|each| Some((each, each.waited?)))
            .collect();
        let lanes = lanes(waits.iter().map(|&(_, times)| times));
        self.lane_names(pid, WAITING, "waiting", &lanes)?;
        for ((each, times), lane) in waits.into_iter().zip(lanes) {
            let name = format!("wait {}", title(each));
            self.slice(pid, WAITING + lane, "wait", name.into(), times, json!({}))?;
        }
        Ok(())
    }

    /// Writes a counter per kind of memory: the allocated bytes after every change.
    fn allocations(&mut self, pid: usize, allocations: &[Allocation]) -> io::Result<()> {
        let mut allocated = [0i64; MemoryKind::COUNT];
        for each in allocations {
            let bytes = &mut allocated[each.kind.index()];
            *bytes = bytes.saturating_add(each.bytes);
            let args = BTreeMap::from([(each.kind, *bytes)]);
            let ts = self.microseconds(each.at_ns);
            let name = "memory".into();
            self.line(&Line {
                name,
                cat: "memory",
                ph: "C",
                ts,
                dur: None,
                pid,
                tid: 0,
                args,
            })?;
        }
        Ok(())
    }

    fn slice(
        &mut self,
        pid: usize,
        tid: u64,
        cat: &str,
        name: Cow<'_, str>,
        (start, end): (u64, u64),
        args: impl Serialize,
    ) -> io::Result<()> {
        let ts = self.microseconds(start);
        let dur = Some(end.saturating_sub(start) as f64 / 1e3);
        self.line(&Line {
            name,
            cat,
            ph: "X",
            ts,
            dur,
            pid,
            tid,
            args,
        })
    }

    fn lane_names(&mut self, pid: usize, base: u64, name: &str, lanes: &[u64]) -> io::Result<()> {
        let num_lanes = lanes.iter().max().map_or(0, |last| last + 1);
        (0..num_lanes).try_for_each(|lane| self.thread(pid, base + lane, format!("{name} {lane}")))
    }

    fn thread(&mut self, pid: usize, tid: u64, name: String) -> io::Result<()> {
        self.meta(pid, tid, "thread_name", json!({ "name": name }))?;
        self.meta(pid, tid, "thread_sort_index", json!({ "sort_index": tid }))
    }

    fn meta(&mut self, pid: usize, tid: u64, name: &str, args: Value) -> io::Result<()> {
        let (name, cat) = (name.into(), "rank");
        self.line(&Line {
            name,
            cat,
            ph: "M",
            ts: 0.0,
            dur: None,
            pid,
            tid,
            args,
        })
    }

    fn line(&mut self, line: &Line<'_, impl Serialize>) -> io::Result<()> {
        if !std::mem::replace(&mut self.is_first, false) {
            writeln!(self.out, ",")?;
        }
        Ok(serde_json::to_writer(&mut *self.out, line)?)
    }

    fn microseconds(&self, at_ns: u64) -> f64 {
        at_ns.saturating_sub(self.origin) as f64 / 1e3
    }
}

/// The viewer's thread id of a rank's thread. Id 0 is reserved for the process itself.
fn thread_id(thread: u64) -> u64 {
    thread.saturating_add(1)
}

/// Assigns each interval the lowest free lane, because a viewer cannot show overlap within a thread.
fn lanes(intervals: impl Iterator<Item = (u64, u64)>) -> Vec<u64> {
    let intervals: Vec<(u64, u64)> = intervals.collect();
    let mut in_order: Vec<usize> = (0..intervals.len()).collect();
    in_order.sort_by_key(|&index| intervals[index]);
    let mut free_at: Vec<u64> = Vec::new();
    let mut lanes = vec![0; intervals.len()];
    for index in in_order {
        let (start, end) = intervals[index];
        let lane = free_at
            .iter()
            .position(|&free| free <= start)
            .unwrap_or(free_at.len());
        if lane == free_at.len() {
            free_at.push(end);
        }
        free_at[lane] = end.max(start);
        lanes[index] = lane as u64;
    }
    lanes
}

/// The parts of a trace file that we read.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Trace {
    #[serde(default)]
    base_time_nanoseconds: u64,
    trace_events: Vec<AnyEvent>,
}

/// An event, written by us or by another program.
#[derive(Deserialize)]
struct AnyEvent {
    #[serde(default)]
    cat: String,
    #[serde(default)]
    pid: Value,
    #[serde(default)]
    ts: Value,
    #[serde(default)]
    args: Value,
}

fn read_ranks(bytes: &[u8]) -> Result<Vec<Events>, serde_json::Error> {
    let trace: Trace = serde_json::from_slice(bytes)?;
    let mut ranks: BTreeMap<usize, (Events, [i64; MemoryKind::COUNT])> = BTreeMap::new();
    for event in trace.trace_events {
        if !["rank", "span", "operator", "collective", "memory"].contains(&event.cat.as_str()) {
            continue;
        }
        let rank = parse(event.pid)?;
        let (events, allocated) = ranks.entry(rank).or_default();
        events.rank = rank;
        match event.cat.as_str() {
            "span" => events.spans.push(parse::<Span>(event.args)?),
            "operator" => events.operators.push(parse::<Operator>(event.args)?),
            "collective" => events.collectives.push(parse::<Collective>(event.args)?),
            "memory" => {
                let at_ns =
                    trace.base_time_nanoseconds + (parse::<f64>(event.ts)? * 1e3).round() as u64;
                for (kind, now) in parse::<BTreeMap<MemoryKind, i64>>(event.args)? {
                    let before = std::mem::replace(&mut allocated[kind.index()], now);
                    events.allocations.push(Allocation {
                        kind,
                        bytes: now.saturating_sub(before),
                        at_ns,
                    });
                }
            }
            _ => {}
        }
    }
    Ok(ranks.into_values().map(|(events, _)| events).collect())
}

fn parse<T: DeserializeOwned>(value: Value) -> Result<T, serde_json::Error> {
    serde_json::from_value(value)
}

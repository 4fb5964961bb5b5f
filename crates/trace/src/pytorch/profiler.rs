//! Traces of PyTorch's profiler, one file per rank.
//!
//! On GPUs, collectives are NCCL's kernels and compute is all other kernels. On CPUs, collectives are Gloo's
//! work on its threads and compute is the operators outside of communication. The sizes of Gloo's collectives
//! are known if the profiler records shapes (`record_shapes=True`).

use std::collections::BTreeMap;

use crate::{Collective, CollectiveKind, Events, IntervalSet, Purpose, Span, SpanKind};

use super::{
    element_type,
    error::PytorchError,
    kineto::{About, Communication, Interval, Kineto, Sorted},
    operation,
};

/// Reads a trace. Without process groups a trace does not have its rank: then the file's name may have it, or
/// it is that of a single process.
pub(crate) fn parse(bytes: &[u8], rank_of_file: Option<usize>) -> Result<Events, PytorchError> {
    let trace: Kineto = serde_json::from_slice(bytes)?;
    let info = trace.distributed_info;
    let rank = info.rank.or(rank_of_file).unwrap_or(0);
    let clock = Clock(trace.base_time_nanoseconds);
    let events = trace.trace_events;
    Ok(Events {
        rank,
        spans: spans(&events, clock),
        collectives: collectives(events, info.world_size.unwrap_or(1), clock),
        ..Events::default()
    })
}

/// The time to which those of events are relative.
#[derive(Clone, Copy)]
struct Clock(u64);

impl Clock {
    fn at(self, relative: u64) -> u64 {
        self.0.saturating_add(relative)
    }
}

fn spans(events: &Sorted, clock: Clock) -> Vec<Span> {
    let span = |name: String, kind: SpanKind, (start, end): Interval| Span {
        name,
        kind,
        started_ns: clock.at(start),
        ended_ns: clock.at(end),
        thread: 0,
    };
    let steps = events
        .steps
        .iter()
        .map(|&(number, time)| span(format!("step {number}"), SpanKind::Step, time));
    let (name, compute) = compute(events);
    let compute = compute
        .intervals()
        .map(|time| span(name.to_owned(), SpanKind::Compute, time));
    steps.chain(compute).collect()
}

/// The time during which the device computes, and what it runs then.
fn compute(events: &Sorted) -> (&'static str, IntervalSet) {
    let is_on_gpu = !(events.kernels.is_empty() && events.nccl_kernels.is_empty());
    if is_on_gpu {
        return ("kernels", events.kernels.iter().copied().collect());
    }
    let operators: IntervalSet = events.operators.iter().copied().collect();
    let communicating = events.communicating_operators.iter().copied().collect();
    ("operators", operators.difference(&communicating))
}

/// The collectives in order of their start: kernels of NCCL and work of Gloo. A trace of the CPU alone has only
/// the calls.
fn collectives(events: Sorted, world_size: usize, clock: Clock) -> Vec<Collective> {
    let Sorted {
        nccl_kernels,
        calls,
        gloo,
        ..
    } = events;
    let calls_by_id: BTreeMap<u64, &Communication> = calls
        .iter()
        .filter_map(|call| Some((call.external_id?, call)))
        .collect();
    let mut found: Vec<Collective> = nccl_kernels
        .iter()
        .chain(&gloo)
        .filter_map(|each| {
            let call = each
                .external_id
                .and_then(|id| calls_by_id.get(&id).copied());
            collective(
                each,
                call.filter(|_| !each.name.starts_with("gloo:")),
                world_size,
                clock,
            )
        })
        .collect();
    if found.is_empty() {
        let alone = |call| collective(call, None, world_size, clock);
        found = calls.iter().filter_map(alone).collect();
    }
    found.sort_by_key(|each| each.started_ns);
    number_calls(&mut found);
    found
}

/// One collective from its kernel, or work, and from the call on the CPU that queued it.
fn collective(
    event: &Communication,
    call: Option<&Communication>,
    world_size: usize,
    clock: Clock,
) -> Option<Collective> {
    let about = match (&event.about, call) {
        (
            About {
                collective: None, ..
            },
            Some(call),
        ) => &call.about,
        (about, _) => about,
    };
    let kind = about
        .collective
        .as_deref()
        .and_then(kind)
        .or_else(|| kind(&event.name))?;
    let dtype = about.dtype.as_deref().unwrap_or_default();
    let payload_bytes = match kind {
        CollectiveKind::Barrier => 0,
        _ => payload_bytes(about, dtype),
    };
    let group_size = about.group_size.unwrap_or(world_size).max(1);
    let description = about.description.as_deref();
    Some(Collective {
        kind,
        group: match (about.group.as_deref(), description) {
            (None, None) => "world".to_owned(),
            (name, description) => {
                operation::group_name(name.unwrap_or_default(), description.unwrap_or_default())
            }
        },
        group_size,
        sequence: about.sequence.unwrap_or(0),
        purpose: Purpose::Unknown,
        dtype: element_type::name(dtype).to_owned(),
        payload_bytes,
        sent_bytes: operation::sent_by_one(kind, group_size, payload_bytes),
        issued_ns: clock.at(call.map_or(event.time.0, |call| call.time.0.min(event.time.0))),
        started_ns: clock.at(event.time.0),
        ended_ns: clock.at(event.time.1),
        waited: None,
    })
}

/// The kind of an operation, or of a kernel such as `ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)`.
fn kind(name: &str) -> Option<CollectiveKind> {
    let kernel = name
        .strip_prefix("ncclDevKernel_")
        .or_else(|| name.strip_prefix("ncclKernel_"));
    operation::kind(kernel.unwrap_or(name))
}

fn payload_bytes(about: &About, dtype: &str) -> u64 {
    let from_shapes = || {
        let bytes = about
            .shapes
            .iter()
            .map(|shape| element_type::tensor_bytes(shape, dtype));
        bytes.fold(0, u64::saturating_add)
    };
    about.num_elements.map_or_else(from_shapes, |number| {
        number.saturating_mul(element_type::size(dtype))
    })
}

/// Numbers the collectives of groups without sequence numbers in order of their start.
fn number_calls(collectives: &mut [Collective]) {
    let mut next = BTreeMap::<String, u64>::new();
    for each in collectives.iter_mut().filter(|each| each.sequence == 0) {
        let next = next.entry(each.group.clone()).or_default();
        *next += 1;
        each.sequence = *next;
    }
}

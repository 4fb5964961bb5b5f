//! The events of a trace of PyTorch's profiler that we use.
//!
//! Such a trace may have millions of events with large arguments. Events are sorted while they are read, and
//! only times and the descriptions of collectives are stored.

use std::{borrow::Cow, fmt};

use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, MapAccess, SeqAccess, Visitor},
};
use serde_json::Value;

/// A trace.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Kineto {
    /// The time to which those of the events are relative.
    #[serde(default)]
    pub base_time_nanoseconds: u64,
    #[serde(default)]
    pub distributed_info: DistributedInfo,
    #[serde(deserialize_with = "sort_events")]
    pub trace_events: Sorted,
}

/// Where the trace was recorded. Empty without process groups.
#[derive(Default, Deserialize)]
pub(super) struct DistributedInfo {
    #[serde(default)]
    pub rank: Option<usize>,
    #[serde(default)]
    pub world_size: Option<usize>,
}

/// Begin and end in nanoseconds, relative to the time of the trace.
pub(super) type Interval = (u64, u64);

/// The events by what they are for us.
#[derive(Default)]
pub(super) struct Sorted {
    /// The number of a step, and its time.
    pub steps: Vec<(u64, Interval)>,
    /// Kernels of the GPU that do not communicate.
    pub kernels: Vec<Interval>,
    /// Kernels of NCCL.
    pub nccl_kernels: Vec<Communication>,
    /// Calls of collectives on the CPU, which queue the kernels of NCCL.
    pub calls: Vec<Communication>,
    /// Collectives of Gloo, on its threads.
    pub gloo: Vec<Communication>,
    /// Operators on the CPU that do not communicate, with all that they call.
    pub operators: Vec<Interval>,
    /// Operators on the CPU that communicate, and may block.
    pub communicating_operators: Vec<Interval>,
}

/// An event of a collective.
pub(super) struct Communication {
    pub name: String,
    pub time: Interval,
    /// The same for a call on the CPU and the kernels that it queues.
    pub external_id: Option<u64>,
    pub about: About,
}

/// What an event tells about its collective.
#[derive(Clone, Debug, Default)]
pub(super) struct About {
    pub collective: Option<String>,
    pub dtype: Option<String>,
    pub num_elements: Option<u64>,
    /// The shapes of the inputs, which the profiler records on demand. Only Gloo needs them.
    pub shapes: Vec<Vec<i64>>,
    pub group_size: Option<usize>,
    pub group: Option<String>,
    pub description: Option<String>,
    pub sequence: Option<u64>,
}

#[derive(Deserialize)]
struct Event<'a> {
    #[serde(default, borrow)]
    ph: Cow<'a, str>,
    #[serde(default, borrow)]
    cat: Cow<'a, str>,
    #[serde(default, borrow)]
    name: Cow<'a, str>,
    #[serde(default)]
    ts: f64,
    #[serde(default)]
    dur: f64,
    #[serde(default)]
    args: Args,
}

/// The arguments of an event. Versions of PyTorch write some of these as numbers and some as text.
#[derive(Default)]
struct Args {
    external_id: Value,
    collective: Value,
    dtype: Value,
    num_elements: Value,
    group_size: Value,
    group: Value,
    description: Value,
    sequence: Value,
    shapes: Value,
    types: Value,
}

impl Args {
    fn field(&mut self, name: &str) -> Option<&mut Value> {
        let field = match name {
            "External id" => &mut self.external_id,
            "Collective name" => &mut self.collective,
            "dtype" => &mut self.dtype,
            "In msg nelems" => &mut self.num_elements,
            "Group size" => &mut self.group_size,
            "Process Group Name" => &mut self.group,
            "Process Group Description" => &mut self.description,
            "Seq" => &mut self.sequence,
            "Input Dims" => &mut self.shapes,
            "Input type" => &mut self.types,
            _ => return None,
        };
        Some(field)
    }
}

/// Not derived: PyTorch joins the arguments of a kernel and of the call that queued it, so a key may appear
/// twice.
impl<'de> Deserialize<'de> for Args {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Args, D::Error> {
        deserializer.deserialize_map(ArgsVisitor)
    }
}

struct ArgsVisitor;

impl<'de> Visitor<'de> for ArgsVisitor {
    type Value = Args;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the arguments of an event")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Args, A::Error> {
        let mut args = Args::default();
        while let Some(Key(key)) = entries.next_key()? {
            match args.field(&key) {
                Some(field) => *field = entries.next_value()?,
                None => drop(entries.next_value::<IgnoredAny>()?),
            }
        }
        Ok(args)
    }
}

/// A key, borrowed from the file where it has no escapes.
#[derive(Deserialize)]
#[serde(transparent)]
struct Key<'a>(#[serde(borrow)] Cow<'a, str>);

impl Args {
    fn about(self) -> About {
        let first_type = self.types.get(0).and_then(Value::as_str).map(str::to_owned);
        let size = number(&self.group_size).and_then(|size| usize::try_from(size).ok());
        About {
            collective: text(self.collective),
            dtype: text(self.dtype).or(first_type),
            num_elements: number(&self.num_elements),
            shapes: serde_json::from_value(self.shapes).unwrap_or_default(),
            group_size: size,
            group: text(self.group),
            description: text(self.description),
            sequence: number(&self.sequence),
        }
    }
}

fn number(value: &Value) -> Option<u64> {
    match value {
        Value::String(text) => text.parse().ok(),
        _ => value.as_u64(),
    }
}

fn text(value: Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.trim_matches('"').to_owned()),
        _ => None,
    }
}

impl Event<'_> {
    fn time(&self) -> Interval {
        // Conversions of floating-point numbers saturate, so nonsense gives nonsense but no panic.
        let at = |microseconds: f64| (microseconds * 1e3).round() as u64;
        (at(self.ts), at(self.ts + self.dur))
    }

    fn into_communication(self) -> Communication {
        Communication {
            time: self.time(),
            external_id: number(&self.args.external_id),
            name: self.name.into_owned(),
            about: self.args.about(),
        }
    }
}

impl Sorted {
    fn add(&mut self, event: Event<'_>) {
        if event.ph != "X" {
            return;
        }
        match &*event.cat {
            "kernel" if event.name.starts_with("nccl") => {
                self.nccl_kernels.push(event.into_communication());
            }
            "kernel" => self.kernels.push(event.time()),
            "user_annotation" => self.add_annotation(event),
            "cpu_op" => self.add_operator(event),
            _ => {}
        }
    }

    fn add_annotation(&mut self, event: Event<'_>) {
        let step = event.name.strip_prefix("ProfilerStep#");
        if let Some(number) = step.and_then(|number| number.parse().ok()) {
            self.steps.push((number, event.time()));
        } else if event.name.starts_with("gloo:") {
            self.gloo.push(event.into_communication());
        }
    }

    fn add_operator(&mut self, event: Event<'_>) {
        if event.name == "record_param_comms" {
            self.communicating_operators.push(event.time());
            self.calls.push(event.into_communication());
        } else if event.name.starts_with("c10d::") || event.name.starts_with("_c10d_functional::") {
            self.communicating_operators.push(event.time());
        } else {
            self.operators.push(event.time());
        }
    }
}

fn sort_events<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Sorted, D::Error> {
    deserializer.deserialize_seq(EventsVisitor)
}

struct EventsVisitor;

impl<'de> Visitor<'de> for EventsVisitor {
    type Value = Sorted;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of events")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut events: A) -> Result<Sorted, A::Error> {
        let mut sorted = Sorted::default();
        while let Some(event) = events.next_element::<Event<'de>>()? {
            sorted.add(event);
        }
        Ok(sorted)
    }
}

//! Dumps of PyTorch's Flight Recorder, one per rank: the last collectives that the rank issued.
//!
//! PyTorch writes a pickle into the file `TORCH_FR_DUMP_TEMP_FILE` (earlier `TORCH_NCCL_DEBUG_INFO_TEMP_FILE`)
//! plus the rank when a collective times out; `_dump_nccl_trace` and `_dump_fr_trace` return the same bytes,
//! and `_dump_nccl_trace_json` and `_dump_fr_trace_json` JSON.
//!
//! PyTorch polls the GPU, so times of starts and ends are late by up to its interval, about 100 ms. Gloo does
//! not record them at all: its collectives have a duration of zero, or last until the end of the dump.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use crate::{Collective, CollectiveKind, Events, Purpose};

use super::{
    dump::{Dump, Entry},
    element_type,
    error::PytorchError,
    frame::Frame,
    operation, pickle, pickle_value,
};

/// The Flight Recorder dump of one rank.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FlightRecorder {
    /// The rank.
    pub rank: usize,
    /// The recorded operations, oldest first.
    pub calls: Vec<RecordedCall>,
}

/// A collective or point-to-point operation in a dump.
#[derive(Clone, Debug, PartialEq)]
pub struct RecordedCall {
    /// The operation. If it is not complete, it ends at the latest time of the dump.
    pub collective: Collective,
    /// The shapes of its inputs.
    pub shapes: Vec<Vec<i64>>,
    /// Whether it is complete.
    pub is_complete: bool,
    /// The innermost Python code outside of PyTorch that called it.
    pub caller: Option<Frame>,
    /// Its group.
    pub(super) group: Arc<GroupId>,
    /// Sender and receiver, such as `0->1`, of a point-to-point operation.
    pub(super) peers: Option<String>,
}

/// Identifies a group on all ranks. Several groups may have the same description.
#[derive(Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) struct GroupId {
    pub name: String,
    pub description: String,
    /// Empty if the dump does not have them.
    pub members: Arc<[usize]>,
}

impl GroupId {
    /// Whether every rank is a member.
    pub fn is_default(&self) -> bool {
        self.description == "default_pg"
    }
}

impl FlightRecorder {
    /// Reads a dump, a pickle or JSON. The rank comes from the file's name unless the dump has it.
    pub fn parse(
        bytes: &[u8],
        rank_of_file: Option<usize>,
    ) -> Result<FlightRecorder, PytorchError> {
        let dump: Dump = if pickle::is_pickle(bytes) {
            pickle_value::from_pickle(&pickle::parse(bytes)?)?
        } else {
            serde_json::from_slice(bytes)?
        };
        let rank = dump.rank.or(rank_of_file).ok_or(PytorchError::NoRank)?;
        Ok(FlightRecorder {
            rank,
            calls: calls(dump),
        })
    }

    /// The operations that are not complete, oldest first.
    pub fn incomplete(&self) -> impl Iterator<Item = &RecordedCall> {
        self.calls.iter().filter(|call| !call.is_complete)
    }

    /// The operations as events.
    pub fn events(&self) -> Events {
        Events {
            rank: self.rank,
            collectives: self
                .calls
                .iter()
                .map(|call| call.collective.clone())
                .collect(),
            ..Events::default()
        }
    }
}

/// Counts the members of groups whose dumps do not have them, as those of Gloo: the ranks that used the group,
/// and every rank for the default group.
pub(crate) fn count_members(dumps: &mut [FlightRecorder]) {
    let mut users = BTreeMap::<Arc<GroupId>, BTreeSet<usize>>::new();
    for dump in dumps.iter() {
        for call in dump
            .calls
            .iter()
            .filter(|call| call.group.members.is_empty())
        {
            users
                .entry(Arc::clone(&call.group))
                .or_default()
                .insert(dump.rank);
        }
    }
    let num_dumps = dumps.len();
    for call in dumps.iter_mut().flat_map(|dump| &mut dump.calls) {
        let Some(users) = users.get(&call.group) else {
            continue;
        };
        let group_size = if call.group.is_default() {
            num_dumps
        } else {
            users.len()
        };
        let Collective {
            kind,
            payload_bytes,
            ..
        } = call.collective;
        call.collective.group_size = group_size;
        call.collective.sent_bytes = operation::sent_by_one(kind, group_size, payload_bytes);
    }
}

fn calls(mut dump: Dump) -> Vec<RecordedCall> {
    finish_coalesced(&mut dump.entries);
    let end_ns = dump.entries.iter().map(Entry::latest_ns).max().unwrap_or(0);
    let mut groups = Groups::new(
        dump.pg_config
            .into_iter()
            .map(|(name, group)| (name, group.ranks)),
    );
    dump.entries
        .into_iter()
        .filter_map(|entry| {
            let kind = operation::kind(&entry.profiling_name)?;
            let group = groups.id_of(&entry);
            Some(call(entry, kind, group, end_ns))
        })
        .collect()
}

/// Gives the operations of a coalesced group the times of the group.
///
/// NCCL starts several operations together. PyTorch records each without times, and after them the group as
/// `nccl:coalesced` with the same sequence numbers.
fn finish_coalesced(entries: &mut [Entry]) {
    for end in 0..entries.len() {
        let (before, from) = entries.split_at_mut(end);
        let Some(group) = from.first() else { return };
        if !group.profiling_name.ends_with(":coalesced") {
            continue;
        }
        let parts = before
            .iter_mut()
            .rev()
            .take_while(|each| each.is_part_of(group));
        for part in parts {
            part.has_completed = group.has_completed;
            part.time_discovered_started_ns = group.time_discovered_started_ns;
            part.time_discovered_completed_ns = group.time_discovered_completed_ns;
            part.duration_ms = group.duration_ms;
        }
    }
}

impl Entry {
    fn is_part_of(&self, group: &Entry) -> bool {
        let numbers = |each: &Entry| (each.collective_seq_id, each.p2p_seq_id);
        numbers(self) == numbers(group)
            && self.process_group == group.process_group
            && !self.profiling_name.ends_with(":coalesced")
    }

    /// Whether it is complete. Gloo records no state, but stops to watch what is complete. NCCL also stops to
    /// watch what has failed.
    fn is_complete(&self) -> bool {
        let is_done = self.retired && !self.profiling_name.starts_with("nccl");
        self.has_completed || is_done
    }

    fn started_ns(&self) -> Option<u64> {
        self.time_discovered_started_ns.filter(|&ns| ns > 0)
    }

    fn completed_ns(&self) -> Option<u64> {
        self.time_discovered_completed_ns.filter(|&ns| ns > 0)
    }

    fn latest_ns(&self) -> u64 {
        let noticed = self.started_ns().max(self.completed_ns());
        self.time_created_ns.max(noticed.unwrap_or(0))
    }

    /// Start and end. The measured duration is more exact than the time at which PyTorch noticed the start.
    fn times(&self, is_complete: bool, end_ns: u64) -> (u64, u64) {
        let issued = self.time_created_ns;
        let noticed = self.started_ns().unwrap_or(issued).max(issued);
        if !is_complete {
            return (noticed, end_ns.max(noticed));
        }
        let ended = self.completed_ns().unwrap_or(noticed).max(issued);
        let measured = self
            .duration_ms
            .filter(|ms| ms.is_finite() && *ms >= 0.0)
            .map(|ms| ended.saturating_sub((ms * 1e6) as u64));
        let started = measured.unwrap_or(noticed).clamp(issued, ended);
        (started, ended)
    }

    fn payload_bytes(&self) -> u64 {
        let types = self.input_dtypes.iter().map(String::as_str);
        let of = |(sizes, dtype): (&Vec<i64>, &str)| element_type::tensor_bytes(sizes, dtype);
        self.input_sizes
            .iter()
            .zip(types)
            .map(of)
            .fold(0, u64::saturating_add)
    }
}

fn call(entry: Entry, kind: CollectiveKind, group: Arc<GroupId>, end_ns: u64) -> RecordedCall {
    let is_complete = entry.is_complete();
    let (started_ns, ended_ns) = entry.times(is_complete, end_ns);
    let payload_bytes = match kind {
        CollectiveKind::Barrier => 0,
        _ => entry.payload_bytes(),
    };
    let group_size = group.members.len().max(1);
    let is_p2p = entry.is_p2p || kind.is_point_to_point();
    let dtype = entry.input_dtypes.first().map_or("", String::as_str);
    let peers = entry.profiling_name.split_once(' ').filter(|_| is_p2p);
    RecordedCall {
        collective: Collective {
            kind,
            group: operation::group_name(&group.name, &group.description),
            group_size,
            sequence: if is_p2p {
                entry.p2p_seq_id
            } else {
                entry.collective_seq_id
            },
            purpose: Purpose::Unknown,
            dtype: element_type::name(dtype).to_owned(),
            payload_bytes,
            sent_bytes: operation::sent_by_one(kind, group_size, payload_bytes),
            issued_ns: entry.time_created_ns,
            started_ns,
            ended_ns,
            waited: None,
        },
        peers: peers.map(|(_, peers)| peers.to_owned()),
        shapes: entry.input_sizes,
        is_complete,
        caller: entry.caller,
        group,
    }
}

/// The groups of a dump.
struct Groups {
    members: BTreeMap<String, Arc<[usize]>>,
    known: BTreeMap<(String, String), Arc<GroupId>>,
}

impl Groups {
    fn new(members: impl Iterator<Item = (String, Vec<usize>)>) -> Groups {
        Groups {
            members: members.map(|(name, ranks)| (name, ranks.into())).collect(),
            known: BTreeMap::new(),
        }
    }

    fn id_of(&mut self, entry: &Entry) -> Arc<GroupId> {
        let members = &self.members;
        let id = self
            .known
            .entry(entry.process_group.clone())
            .or_insert_with_key(|(name, description)| {
                Arc::new(GroupId {
                    name: name.clone(),
                    description: description.clone(),
                    members: members.get(name).cloned().unwrap_or_default(),
                })
            });
        Arc::clone(id)
    }
}

//! The fields of a Flight Recorder dump that we read. PyTorch's `FlightRecorderDetail.hpp` writes them.

use std::{collections::BTreeMap, fmt};

use serde::{
    Deserialize, Deserializer,
    de::{SeqAccess, Visitor},
};

use super::frame::{self, Frame};

/// A dump.
#[derive(Debug, Deserialize)]
pub(super) struct Dump {
    /// Written by some tools, not by PyTorch.
    #[serde(default)]
    pub rank: Option<usize>,
    /// The groups by name.
    pub pg_config: BTreeMap<String, Group>,
    /// The operations, oldest first. A dump in JSON without operations has no such key.
    #[serde(default)]
    pub entries: Vec<Entry>,
}

/// A process group.
#[derive(Debug, Deserialize)]
pub(super) struct Group {
    /// The members, as `[0, 1]` in text. Gloo leaves it empty.
    #[serde(default, deserialize_with = "members")]
    pub ranks: Vec<usize>,
}

/// An operation.
#[derive(Debug, Deserialize)]
pub(super) struct Entry {
    /// The name and the description of the group.
    pub process_group: (String, String),
    /// The number of the last collective of the group.
    #[serde(alias = "seq_id")]
    pub collective_seq_id: u64,
    /// The number of the last send or receive of the group.
    #[serde(default)]
    pub p2p_seq_id: u64,
    #[serde(default)]
    pub is_p2p: bool,
    /// Such as `nccl:all_reduce`, `nccl:send 0->1`.
    pub profiling_name: String,
    pub time_created_ns: u64,
    /// Measured on the GPU, if the user enabled it.
    #[serde(default)]
    pub duration_ms: Option<f64>,
    pub input_sizes: Vec<Vec<i64>>,
    #[serde(default)]
    pub input_dtypes: Vec<String>,
    /// Whether the state is `completed`, and neither `scheduled` nor `started`.
    #[serde(rename = "state", deserialize_with = "is_completed")]
    pub has_completed: bool,
    /// When PyTorch noticed that it had started; 0 or none if it did not.
    #[serde(default)]
    pub time_discovered_started_ns: Option<u64>,
    /// When PyTorch noticed that it was complete; 0 or none if it did not.
    #[serde(default)]
    pub time_discovered_completed_ns: Option<u64>,
    /// Whether PyTorch no longer watches it.
    #[serde(default)]
    pub retired: bool,
    /// Who called it.
    #[serde(default, rename = "frames", deserialize_with = "frame::innermost")]
    pub caller: Option<Frame>,
}

fn is_completed<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    Ok(String::deserialize(deserializer)? == "completed")
}

fn members<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<usize>, D::Error> {
    deserializer.deserialize_any(Members)
}

/// Reads the members of a group from text or from a list.
struct Members;

impl<'de> Visitor<'de> for Members {
    type Value = Vec<usize>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of ranks, or its text")
    }

    fn visit_str<E>(self, text: &str) -> Result<Vec<usize>, E> {
        Ok(parse_ranks(text))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut ranks: A) -> Result<Vec<usize>, A::Error> {
        let mut members = Vec::new();
        while let Some(rank) = ranks.next_element()? {
            members.push(rank);
        }
        Ok(members)
    }
}

/// The ranks in text such as `[0, 1]`.
pub(super) fn parse_ranks(text: &str) -> Vec<usize> {
    text.split(|each: char| !each.is_ascii_digit())
        .filter_map(|number| number.parse().ok())
        .collect()
}

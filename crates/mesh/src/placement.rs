//! How an axis treats a tensor.
//!
//! Every parameter has one placement per axis, and nothing else describes its sharding:
//! checkpointing, resharding, clipping, planning and verifying all read the same layout.

use std::{collections::BTreeMap, fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::{Axis, AxisSet, MeshError};

/// A dimension of a tensor, which cannot be mistaken for an axis of the mesh.
#[derive(Copy, Clone, Debug, Eq, PartialEq, Hash, Ord, PartialOrd, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Dim(pub usize);

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Where a flattened local tensor lies in a row of several that are cut together.
///
/// The row is what a unit's parameters are, one after the other: cutting it once, instead of every
/// parameter, pads once and makes of a gather one message.
#[derive(Copy, Clone, Debug, Eq, PartialEq, Hash)]
pub struct Packed {
    /// Elements of the row before this tensor's first.
    pub start: usize,
    /// Elements of the row.
    pub total: usize,
}

/// What the ranks along one axis hold of a tensor.
///
/// Written `replicate`, `shard(0)`, `flat`, `packed(128,4096)`, `partial`.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq, Hash)]
pub enum Placement {
    /// Every rank holds the same.
    #[default]
    Replicate,
    /// Every rank holds a chunk along a dimension.
    Shard(Dim),
    /// Every rank holds an interval of the flattened local tensor.
    Flat,
    /// Every rank holds a chunk of a row in which the flattened local tensor is one of several. All
    /// axes that are packed cut the row together, in rank order.
    Packed(Packed),
    /// Every rank holds a term of a sum that is still to be reduced.
    Partial,
}

impl Placement {
    /// Whether ranks along the axis hold different elements.
    pub const fn is_cut(self) -> bool {
        matches!(
            self,
            Placement::Shard(_) | Placement::Flat | Placement::Packed(_)
        )
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Placement::Replicate => f.pad("replicate"),
            Placement::Shard(dim) => f.pad(&format!("shard({dim})")),
            Placement::Flat => f.pad("flat"),
            Placement::Packed(Packed { start, total }) => {
                f.pad(&format!("packed({start},{total})"))
            }
            Placement::Partial => f.pad("partial"),
        }
    }
}

impl FromStr for Placement {
    type Err = MeshError;

    fn from_str(text: &str) -> Result<Placement, MeshError> {
        match text {
            "replicate" => Ok(Placement::Replicate),
            "flat" => Ok(Placement::Flat),
            "partial" => Ok(Placement::Partial),
            _ => in_brackets(text, "shard(")
                .and_then(|dim| dim.parse().ok())
                .map(|dim| Placement::Shard(Dim(dim)))
                .or_else(|| packed(in_brackets(text, "packed(")?))
                .ok_or_else(|| MeshError::UnknownPlacement {
                    text: text.to_owned(),
                }),
        }
    }
}

fn in_brackets<'a>(text: &'a str, opening: &str) -> Option<&'a str> {
    text.strip_prefix(opening)?.strip_suffix(')')
}

fn packed(numbers: &str) -> Option<Placement> {
    let (start, total) = numbers.split_once(',')?;
    Some(Placement::Packed(Packed {
        start: start.parse().ok()?,
        total: total.parse().ok()?,
    }))
}

impl Serialize for Placement {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Placement {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Placement, D::Error> {
        String::deserialize(deserializer)?
            .parse()
            .map_err(de::Error::custom)
    }
}

/// One placement per axis. Serialised as a map that leaves out replicated axes.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq, Hash)]
pub struct Layout([Placement; Axis::EVERY_COUNT]);

impl Layout {
    /// The same on every rank.
    pub const fn replicated() -> Layout {
        Layout([Placement::Replicate; Axis::EVERY_COUNT])
    }

    /// Experts, one after the other along the first dimension, each on one rank of `ep`.
    pub const fn of_experts() -> Layout {
        Layout::replicated().with(Axis::Ep, Placement::Shard(Dim(0)))
    }

    /// Whether it is one of experts, be they on one rank or on several.
    pub fn is_of_experts(&self) -> bool {
        self.get(Axis::Ep) != Placement::Replicate
    }

    /// The axes along which ranks of one stage hold the same.
    pub fn same_axes(&self) -> AxisSet {
        let own = match self.is_of_experts() {
            true => AxisSet::EXPERT.system(),
            false => AxisSet::ALL,
        };
        let others = self.cut_axes().union(Axis::Pp.into());
        own.iter().filter(|&axis| !others.contains(axis)).collect()
    }

    /// The same layout, but for `placement` along `axis`.
    #[must_use]
    pub const fn with(mut self, axis: Axis, placement: Placement) -> Layout {
        self.0[axis.index()] = placement;
        self
    }

    /// The placement along `axis`.
    pub const fn get(&self, axis: Axis) -> Placement {
        self.0[axis.index()]
    }

    /// The axes along which ranks hold different elements.
    pub fn cut_axes(&self) -> AxisSet {
        self.axes_where(Placement::is_cut)
    }

    /// The axes along which a sum is still to be reduced.
    pub fn partial_axes(&self) -> AxisSet {
        self.axes_where(|placement| placement == Placement::Partial)
    }

    fn axes_where(&self, holds: impl Fn(Placement) -> bool) -> AxisSet {
        Axis::EVERY
            .into_iter()
            .filter(|&axis| holds(self.get(axis)))
            .collect()
    }

    fn cuts_and_partials(&self) -> impl Iterator<Item = (Axis, Placement)> + '_ {
        Axis::EVERY
            .into_iter()
            .map(|axis| (axis, self.get(axis)))
            .filter(|&(_, placement)| placement != Placement::Replicate)
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts: Vec<String> = self
            .cuts_and_partials()
            .map(|(axis, placement)| format!("{axis} {placement}"))
            .collect();
        f.pad(
            if parts.is_empty() {
                "replicated".to_owned()
            } else {
                parts.join(", ")
            }
            .as_str(),
        )
    }
}

impl Serialize for Layout {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.cuts_and_partials())
    }
}

impl<'de> Deserialize<'de> for Layout {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Layout, D::Error> {
        let placements = BTreeMap::<Axis, Placement>::deserialize(deserializer)?;
        Ok(placements
            .into_iter()
            .fold(Layout::replicated(), |layout, (axis, placement)| {
                layout.with(axis, placement)
            }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placements_come_back() {
        for placement in [
            Placement::Replicate,
            Placement::Shard(Dim(3)),
            Placement::Flat,
            Placement::Packed(Packed { start: 3, total: 9 }),
            Placement::Partial,
        ] {
            assert_eq!(placement.to_string().parse(), Ok(placement));
        }
        assert!("shard".parse::<Placement>().is_err());
        assert!("shard(x)".parse::<Placement>().is_err());
        assert!("packed(3)".parse::<Placement>().is_err());
    }

    #[test]
    fn experts_are_the_same_where_neither_they_nor_their_shards_differ() {
        let experts = Layout::of_experts();
        assert!(experts.is_of_experts());
        let same = AxisSet::of([Axis::DpReplicate, Axis::Efsdp]);
        assert_eq!(experts.same_axes(), same);
        let sharded = experts.with(Axis::Efsdp, Placement::Flat);
        assert_eq!(sharded.same_axes(), Axis::DpReplicate.into());
        assert_eq!(sharded.to_string(), "efsdp flat, ep shard(0)");
        let cut = Layout::replicated().with(Axis::Tp, Placement::Shard(Dim(1)));
        let same = AxisSet::of([Axis::DpReplicate, Axis::DpShard, Axis::Cp]);
        assert_eq!(cut.same_axes(), same);
    }

    #[test]
    fn layouts_are_written_as_what_differs_from_replicated() {
        let layout = Layout::replicated()
            .with(Axis::Tp, Placement::Shard(Dim(0)))
            .with(Axis::DpShard, Placement::Flat)
            .with(Axis::Cp, Placement::Partial);
        assert_eq!(layout.to_string(), "dp_shard flat, cp partial, tp shard(0)");
        assert_eq!(Layout::replicated().to_string(), "replicated");
        assert_eq!(layout.cut_axes(), AxisSet::of([Axis::DpShard, Axis::Tp]));
        assert_eq!(layout.partial_axes(), Axis::Cp.into());

        let json = serde_json::to_string(&layout).unwrap();
        assert_eq!(
            json,
            r#"{"dp_shard":"flat","cp":"partial","tp":"shard(0)"}"#
        );
        assert_eq!(serde_json::from_str::<Layout>(&json).unwrap(), layout);
    }
}

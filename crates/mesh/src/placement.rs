//! Placements and layouts: how the ranks along each mesh axis hold a tensor.
//!
//! A parameter has one placement per axis, and nothing else describes its sharding: checkpointing, resharding,
//! gradient clipping, planning and verification all read the same layout.

use std::{collections::BTreeMap, fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::{Axis, AxisSet, MeshError};

/// A dimension of a tensor, as a type of its own so that it is not confused with a mesh axis.
#[derive(Copy, Clone, Debug, Eq, PartialEq, Hash, Ord, PartialOrd, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Dim(pub usize);

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The position of a flattened local tensor in a flat parameter, which concatenates several tensors.
///
/// FSDP concatenates the parameters of a unit and shards the result once, instead of sharding each parameter:
/// it pads once, and gathers with one collective.
#[derive(Copy, Clone, Debug, Eq, PartialEq, Hash)]
pub struct Packed {
    /// Offset of the tensor in the flat parameter.
    pub start: usize,
    /// Number of elements of the flat parameter, without padding.
    pub total: usize,
}

/// How the ranks along one axis hold a tensor.
///
/// Its text forms are `replicate`, `shard(0)`, `flat`, `packed(128,4096)` and `partial`.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq, Hash)]
pub enum Placement {
    /// Every rank holds the full tensor.
    #[default]
    Replicate,
    /// Every rank holds a chunk along a dimension.
    Shard(Dim),
    /// Every rank holds an interval of the flattened local tensor.
    Flat,
    /// Every rank holds a chunk of a flat parameter in which the flattened local tensor is one of several. All
    /// packed axes shard the flat parameter together, in rank order.
    Packed(Packed),
    /// Every rank holds a partial sum that is still to be reduced.
    Partial,
}

impl Placement {
    /// Whether ranks along the axis hold different elements.
    pub const fn is_sharded(self) -> bool {
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

/// One placement per axis. It is serialized as a map without the replicated axes.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq, Hash)]
pub struct Layout([Placement; Axis::COUNT_WITH_EXPERT]);

impl Layout {
    /// Replicated on every rank.
    pub const fn replicated() -> Layout {
        Layout([Placement::Replicate; Axis::COUNT_WITH_EXPERT])
    }

    /// Expert parameters: stacked along the first dimension and sharded over `ep`.
    pub const fn experts() -> Layout {
        Layout::replicated().with(Axis::Ep, Placement::Shard(Dim(0)))
    }

    /// Whether the layout is that of expert parameters, whatever the size of `ep`.
    pub fn is_expert(&self) -> bool {
        self.get(Axis::Ep) != Placement::Replicate
    }

    /// The axes along which ranks of one pipeline stage hold the same elements, partial sums included.
    pub fn replicated_axes(&self) -> AxisSet {
        let grid = if self.is_expert() {
            AxisSet::EXPERT.basis()
        } else {
            AxisSet::ALL
        };
        let others = self.sharded_axes().union(Axis::Pp.into());
        grid.iter().filter(|&axis| !others.contains(axis)).collect()
    }

    /// The same layout with another `placement` along `axis`.
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
    pub fn sharded_axes(&self) -> AxisSet {
        self.axes_where(Placement::is_sharded)
    }

    /// The axes along which ranks hold partial sums.
    pub fn partial_axes(&self) -> AxisSet {
        self.axes_where(|placement| placement == Placement::Partial)
    }

    fn axes_where(&self, holds: impl Fn(Placement) -> bool) -> AxisSet {
        Axis::ALL_WITH_EXPERT
            .into_iter()
            .filter(|&axis| holds(self.get(axis)))
            .collect()
    }

    fn non_replicated(&self) -> impl Iterator<Item = (Axis, Placement)> + '_ {
        Axis::ALL_WITH_EXPERT
            .into_iter()
            .map(|axis| (axis, self.get(axis)))
            .filter(|&(_, placement)| placement != Placement::Replicate)
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let entries: Vec<String> = self
            .non_replicated()
            .map(|(axis, placement)| format!("{axis} {placement}"))
            .collect();
        f.pad(
            if entries.is_empty() {
                "replicated".to_owned()
            } else {
                entries.join(", ")
            }
            .as_str(),
        )
    }
}

impl Serialize for Layout {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.non_replicated())
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
    fn placements_round_trip() {
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
    fn experts_are_replicated_along_axes_that_shard_neither_them_nor_their_states() {
        let experts = Layout::experts();
        assert!(experts.is_expert());
        let same = AxisSet::of([Axis::DpOuter, Axis::DpReplicate, Axis::Efsdp]);
        assert_eq!(experts.replicated_axes(), same);
        let sharded = experts.with(Axis::Efsdp, Placement::Flat);
        let same = AxisSet::of([Axis::DpOuter, Axis::DpReplicate]);
        assert_eq!(sharded.replicated_axes(), same);
        assert_eq!(sharded.to_string(), "efsdp flat, ep shard(0)");
        let cut = Layout::replicated().with(Axis::Tp, Placement::Shard(Dim(1)));
        let same = AxisSet::of([Axis::DpOuter, Axis::DpReplicate, Axis::DpShard, Axis::Cp]);
        assert_eq!(cut.replicated_axes(), same);
    }

    #[test]
    fn layouts_are_written_without_replicated_axes() {
        let layout = Layout::replicated()
            .with(Axis::Tp, Placement::Shard(Dim(0)))
            .with(Axis::DpShard, Placement::Flat)
            .with(Axis::Cp, Placement::Partial);
        assert_eq!(layout.to_string(), "dp_shard flat, cp partial, tp shard(0)");
        assert_eq!(Layout::replicated().to_string(), "replicated");
        assert_eq!(
            layout.sharded_axes(),
            AxisSet::of([Axis::DpShard, Axis::Tp])
        );
        assert_eq!(layout.partial_axes(), Axis::Cp.into());

        let json = serde_json::to_string(&layout).unwrap();
        assert_eq!(
            json,
            r#"{"dp_shard":"flat","cp":"partial","tp":"shard(0)"}"#
        );
        assert_eq!(serde_json::from_str::<Layout>(&json).unwrap(), layout);
    }
}

//! Mesh axes: the five dimensions along which ranks are laid out, the two of expert parallelism, and sets of axes.
//!
//! Axes are ordered outermost first. Neighbors along `tp` are consecutive ranks, so the axis that communicates
//! most stays inside a node.
//!
//! Expert parameters view the ranks of `dp_shard`, `cp` and `tp` as a second grid, `efsdp` times `ep`. A set
//! therefore uses either the dense axes or the expert axes, never both.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::MeshError;

/// One dimension of the device mesh, outermost first.
#[derive(
    Copy, Clone, Eq, PartialEq, Hash, Ord, PartialOrd, Debug, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum Axis {
    /// Outer data parallel: ranks hold replicas that take optimizer steps of their own and are averaged now and then.
    DpOuter,
    /// Pipeline parallel: ranks hold different layers.
    Pp,
    /// Replicated data parallel: ranks hold the same parameters and process different samples.
    DpReplicate,
    /// Sharded data parallel: ranks shard the states of one replica and process different samples.
    DpShard,
    /// Context parallel: ranks process different positions of each sequence.
    Cp,
    /// Tensor parallel: ranks compute different shards of each layer.
    Tp,
    /// Expert FSDP: ranks hold the same experts and shard their states. Together with `ep` inside it, it covers
    /// the ranks of `dp_shard`, `cp` and `tp`.
    Efsdp,
    /// Expert parallel: ranks hold different experts of each layer.
    Ep,
}

impl Axis {
    /// Number of axes that determine a rank.
    pub const COUNT: usize = 6;

    /// Number of axes, the two of expert parallelism included.
    pub(crate) const COUNT_WITH_EXPERT: usize = 8;

    /// The axes whose coordinates determine a rank, outermost first.
    pub const ALL: [Axis; Axis::COUNT] = [
        Axis::DpOuter,
        Axis::Pp,
        Axis::DpReplicate,
        Axis::DpShard,
        Axis::Cp,
        Axis::Tp,
    ];

    /// All axes, the two of expert parallelism included, outermost first.
    pub(crate) const ALL_WITH_EXPERT: [Axis; Axis::COUNT_WITH_EXPERT] = [
        Axis::DpOuter,
        Axis::Pp,
        Axis::DpReplicate,
        Axis::DpShard,
        Axis::Cp,
        Axis::Tp,
        Axis::Efsdp,
        Axis::Ep,
    ];

    /// The axes that divide the batch.
    pub const DATA: [Axis; 3] = [Axis::DpOuter, Axis::DpReplicate, Axis::DpShard];

    /// The name of the axis in config files.
    pub const fn name(self) -> &'static str {
        match self {
            Axis::DpOuter => "dp_outer",
            Axis::Pp => "pp",
            Axis::DpReplicate => "dp_replicate",
            Axis::DpShard => "dp_shard",
            Axis::Cp => "cp",
            Axis::Tp => "tp",
            Axis::Efsdp => "efsdp",
            Axis::Ep => "ep",
        }
    }

    pub(crate) const fn index(self) -> usize {
        self as usize
    }
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Axis {
    type Err = MeshError;

    fn from_str(name: &str) -> Result<Axis, MeshError> {
        Axis::ALL_WITH_EXPERT
            .into_iter()
            .find(|axis| axis.name() == name)
            .ok_or_else(|| MeshError::UnknownAxis {
                name: name.to_owned(),
            })
    }
}

/// A set of axes: those along which the ranks of a process group differ.
///
/// Its text form is `dp_shard+cp`; the set of all axes is `world`, the empty set is `self`.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Ord, PartialOrd, Debug, Default)]
pub struct AxisSet(u8);

impl AxisSet {
    /// No axis: a group of one rank.
    pub const EMPTY: AxisSet = AxisSet(0);

    /// All dense axes: the world.
    pub const ALL: AxisSet = AxisSet((1 << Axis::COUNT) - 1);

    /// The axes that expert parallelism re-divides: the innermost ones, so that expert groups are consecutive ranks.
    pub(crate) const INNER: AxisSet =
        AxisSet((1 << Axis::DpShard.index()) | (1 << Axis::Cp.index()) | (1 << Axis::Tp.index()));

    /// The axes of expert parallelism, which cover the same ranks as `INNER`.
    pub(crate) const EXPERT: AxisSet =
        AxisSet((1 << Axis::Efsdp.index()) | (1 << Axis::Ep.index()));

    /// All axes of the grid that this set belongs to: the dense grid or the expert grid.
    pub(crate) const fn basis(self) -> AxisSet {
        match self.0 & AxisSet::EXPERT.0 {
            0 => AxisSet::ALL,
            _ => AxisSet((AxisSet::ALL.0 & !AxisSet::INNER.0) | AxisSet::EXPERT.0),
        }
    }

    /// Whether the set mixes axes of the dense and of the expert grid, so that it defines no group.
    pub(crate) const fn is_mixed(self) -> bool {
        self.0 & !self.basis().0 != 0
    }

    /// Builds a set of the given axes.
    pub fn of(axes: impl IntoIterator<Item = Axis>) -> AxisSet {
        axes.into_iter().collect()
    }

    /// Whether `axis` is in the set.
    pub const fn contains(self, axis: Axis) -> bool {
        self.0 & (1 << axis.index()) != 0
    }

    /// Whether the set has no axis.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The axes in either set.
    pub const fn union(self, other: AxisSet) -> AxisSet {
        AxisSet(self.0 | other.0)
    }

    /// The axes in both sets.
    pub const fn intersection(self, other: AxisSet) -> AxisSet {
        AxisSet(self.0 & other.0)
    }

    /// The axes that are not in the set, within the dense grid, or within the expert grid if the set has an
    /// expert axis.
    pub const fn complement(self) -> AxisSet {
        AxisSet(!self.0 & self.basis().0)
    }

    /// The axes of the set, outermost first.
    pub fn iter(self) -> impl DoubleEndedIterator<Item = Axis> + Clone {
        Axis::ALL_WITH_EXPERT
            .into_iter()
            .filter(move |&axis| self.contains(axis))
    }
}

impl From<Axis> for AxisSet {
    fn from(axis: Axis) -> AxisSet {
        AxisSet(1 << axis.index())
    }
}

impl FromIterator<Axis> for AxisSet {
    fn from_iter<I: IntoIterator<Item = Axis>>(axes: I) -> AxisSet {
        axes.into_iter()
            .fold(AxisSet::EMPTY, |set, axis| set.union(axis.into()))
    }
}

impl fmt::Display for AxisSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            AxisSet::EMPTY => f.pad("self"),
            AxisSet::ALL => f.pad("world"),
            set => f.pad(&set.iter().map(Axis::name).collect::<Vec<_>>().join("+")),
        }
    }
}

impl FromStr for AxisSet {
    type Err = MeshError;

    fn from_str(text: &str) -> Result<AxisSet, MeshError> {
        match text {
            "self" => Ok(AxisSet::EMPTY),
            "world" => Ok(AxisSet::ALL),
            names => names
                .split('+')
                .map(|name| name.trim().parse::<Axis>())
                .collect(),
        }
    }
}

impl Serialize for AxisSet {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for AxisSet {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<AxisSet, D::Error> {
        String::deserialize(deserializer)?
            .parse()
            .map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn names_round_trip() {
        for axis in Axis::ALL_WITH_EXPERT {
            assert_eq!(axis.name().parse(), Ok(axis));
            let json = serde_json::to_string(&axis).unwrap();
            assert_eq!(json, format!("\"{axis}\""));
            assert_eq!(serde_json::from_str::<Axis>(&json).unwrap(), axis);
        }
        let error = "dp".parse::<Axis>().unwrap_err();
        assert!(
            error.to_string().contains("`dp` is not a mesh axis"),
            "{error}"
        );
    }

    #[test]
    fn sets_are_written_outermost_first() {
        let set = AxisSet::of([Axis::Cp, Axis::DpShard]);
        assert_eq!(set.to_string(), "dp_shard+cp");
        assert_eq!(AxisSet::ALL.to_string(), "world");
        assert_eq!(AxisSet::EMPTY.to_string(), "self");
        assert_eq!(
            set.iter().rev().collect::<Vec<_>>(),
            [Axis::Cp, Axis::DpShard]
        );
    }

    #[test]
    fn expert_axes_form_a_grid_of_their_own() {
        let set = AxisSet::of([Axis::Ep, Axis::DpReplicate]);
        assert_eq!(set.to_string(), "dp_replicate+ep");
        assert_eq!(
            set.complement(),
            AxisSet::of([Axis::DpOuter, Axis::Pp, Axis::Efsdp]),
            "the complement stays within the expert grid"
        );
        assert!(!set.is_mixed());
        assert!(set.union(Axis::Tp.into()).is_mixed());
    }

    proptest! {
        #[test]
        fn sets_are_a_boolean_algebra(a in 0u8..32, b in 0u8..32) {
            let (a, b) = (AxisSet(a), AxisSet(b));
            prop_assert_eq!(a.union(a.complement()), AxisSet::ALL);
            prop_assert_eq!(a.intersection(a.complement()), AxisSet::EMPTY);
            prop_assert_eq!(
                a.union(b).complement(),
                a.complement().intersection(b.complement())
            );
            prop_assert_eq!(AxisSet::of(a.iter()), a);
            prop_assert_eq!(a.to_string().parse(), Ok(a));
            let json = serde_json::to_string(&a).unwrap();
            prop_assert_eq!(serde_json::from_str::<AxisSet>(&json).unwrap(), a);
        }
    }
}

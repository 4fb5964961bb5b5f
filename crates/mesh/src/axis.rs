//! The five directions in which ranks are laid out, the two in which experts are, and sets of them.
//!
//! An axis is a reason to have several ranks. Their order is the mesh's order, outermost first:
//! neighbours along `tp` are neighbouring ranks, so the chattiest axis stays inside a machine.
//!
//! Experts count the ranks of `dp_shard`, `cp` and `tp` in another way: as `efsdp` times `ep`. So those
//! are axes too, of groups and of layouts; a set has axes of one way of counting or of the other.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::MeshError;

/// One direction of the mesh, outermost first.
#[derive(
    Copy, Clone, Eq, PartialEq, Hash, Ord, PartialOrd, Debug, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum Axis {
    /// Pipeline: ranks hold different layers.
    Pp,
    /// Data, replicated: ranks hold the same and see different samples.
    DpReplicate,
    /// Data, sharded: ranks share what one replica holds and see different samples.
    DpShard,
    /// Context: ranks see different parts of each sequence.
    Cp,
    /// Tensor: ranks compute different parts of each layer.
    Tp,
    /// Of the ranks that have the same experts: they share what one copy of those holds. Laid, with
    /// `ep` inside, over `dp_shard`, `cp` and `tp`.
    Efsdp,
    /// Experts: ranks have different ones of each layer.
    Ep,
}

impl Axis {
    /// How many axes a rank's place has.
    pub const COUNT: usize = 5;

    /// How many there are with those of experts.
    pub(crate) const EVERY_COUNT: usize = 7;

    /// The axes that together say where a rank stands, outermost first.
    pub const ALL: [Axis; Axis::COUNT] = [
        Axis::Pp,
        Axis::DpReplicate,
        Axis::DpShard,
        Axis::Cp,
        Axis::Tp,
    ];

    /// Those of experts too; inner ones come later.
    pub(crate) const EVERY: [Axis; Axis::EVERY_COUNT] = [
        Axis::Pp,
        Axis::DpReplicate,
        Axis::DpShard,
        Axis::Cp,
        Axis::Tp,
        Axis::Efsdp,
        Axis::Ep,
    ];

    /// The name that configs use.
    pub const fn name(self) -> &'static str {
        match self {
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
        Axis::EVERY
            .into_iter()
            .find(|axis| axis.name() == name)
            .ok_or_else(|| MeshError::UnknownAxis {
                name: name.to_owned(),
            })
    }
}

/// Some of the axes: those along which the ranks of a group differ.
///
/// Written `dp_shard+cp`; all axes are `world`, none is `self`.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Ord, PartialOrd, Debug, Default)]
pub struct AxisSet(u8);

impl AxisSet {
    /// No axis: a rank and nobody else.
    pub const EMPTY: AxisSet = AxisSet(0);

    /// Every axis of a rank's place: the world.
    pub const ALL: AxisSet = AxisSet((1 << Axis::COUNT) - 1);

    /// What experts are laid over: the innermost axes, so that their ranks are consecutive.
    pub(crate) const INNER: AxisSet =
        AxisSet((1 << Axis::DpShard.index()) | (1 << Axis::Cp.index()) | (1 << Axis::Tp.index()));

    /// How experts count the ranks of those.
    pub(crate) const EXPERT: AxisSet =
        AxisSet((1 << Axis::Efsdp.index()) | (1 << Axis::Ep.index()));

    /// All axes of the way of counting that this set is of.
    pub(crate) const fn system(self) -> AxisSet {
        match self.0 & AxisSet::EXPERT.0 {
            0 => AxisSet::ALL,
            _ => AxisSet((AxisSet::ALL.0 & !AxisSet::INNER.0) | AxisSet::EXPERT.0),
        }
    }

    /// Whether the axes are of both ways of counting, so that no group runs along them.
    pub(crate) const fn is_mixed(self) -> bool {
        self.0 & !self.system().0 != 0
    }

    /// The set of these axes.
    pub fn of(axes: impl IntoIterator<Item = Axis>) -> AxisSet {
        axes.into_iter().collect()
    }

    /// Whether `axis` is in the set.
    pub const fn contains(self, axis: Axis) -> bool {
        self.0 & (1 << axis.index()) != 0
    }

    /// Whether the set holds no axis.
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

    /// The axes that are not in the set: of all ranks' places, or of experts' where the set has one of
    /// theirs.
    pub const fn complement(self) -> AxisSet {
        AxisSet(!self.0 & self.system().0)
    }

    /// The axes of the set, outermost first.
    pub fn iter(self) -> impl DoubleEndedIterator<Item = Axis> + Clone {
        Axis::EVERY
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
    fn names_come_back() {
        for axis in Axis::EVERY {
            assert_eq!(axis.name().parse(), Ok(axis));
            let json = serde_json::to_string(&axis).unwrap();
            assert_eq!(json, format!("\"{axis}\""));
            assert_eq!(serde_json::from_str::<Axis>(&json).unwrap(), axis);
        }
        let error = "dp".parse::<Axis>().unwrap_err();
        assert!(
            error.to_string().contains("`dp` is no mesh axis"),
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
    fn experts_count_the_inner_ranks_in_their_own_way() {
        let set = AxisSet::of([Axis::Ep, Axis::DpReplicate]);
        assert_eq!(set.to_string(), "dp_replicate+ep");
        assert_eq!(
            set.complement(),
            AxisSet::of([Axis::Pp, Axis::Efsdp]),
            "what is left of their way of counting"
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

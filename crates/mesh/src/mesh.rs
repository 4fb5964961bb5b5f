//! Ranks as points of a grid.
//!
//! A rank is its coordinates in row-major order, outermost axis first, so the ranks of a group are in ascending
//! order. The mesh stores only the axis sizes; a query costs at most the size of the group it returns.

use std::{collections::BTreeMap, fmt};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de, ser::SerializeMap};

use crate::{Axis, AxisSet, MeshError};

/// The ranks of a job, laid out along five axes, with expert parallelism over the inner three.
#[derive(Clone, Debug, Eq, PartialEq, Hash)]
pub struct Mesh {
    sizes: [usize; Axis::COUNT],
    ep: usize,
}

/// The coordinates of a rank: one per axis, the expert axes included.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq, Hash)]
pub struct Coordinates([usize; Axis::COUNT_WITH_EXPERT]);

impl Coordinates {
    /// The coordinate along `axis`.
    pub const fn get(&self, axis: Axis) -> usize {
        self.0[axis.index()]
    }

    /// The same coordinates with another `coordinate` along `axis`.
    #[must_use]
    pub const fn with(mut self, axis: Axis, coordinate: usize) -> Coordinates {
        self.0[axis.index()] = coordinate;
        self
    }
}

impl Mesh {
    /// A mesh with the given sizes; other axes have size 1.
    pub fn new(sizes: &[(Axis, usize)]) -> Result<Mesh, MeshError> {
        let mut all = [1; Axis::COUNT];
        let mut seen = AxisSet::EMPTY;
        for &(axis, size) in sizes {
            if size == 0 {
                return Err(MeshError::EmptyAxis { axis });
            }
            if AxisSet::EXPERT.contains(axis) {
                return Err(MeshError::DerivedAxis { axis });
            }
            if seen.contains(axis) {
                return Err(MeshError::DuplicateAxis { axis });
            }
            seen = seen.union(axis.into());
            all[axis.index()] = size;
        }
        all.iter()
            .try_fold(1usize, |product, &size| product.checked_mul(size))
            .ok_or_else(|| MeshError::TooManyRanks {
                sizes: all.to_vec(),
            })?;
        Ok(Mesh { sizes: all, ep: 1 })
    }

    /// A mesh of one rank.
    pub const fn single() -> Mesh {
        Mesh {
            sizes: [1; Axis::COUNT],
            ep: 1,
        }
    }

    /// The same mesh with expert parallelism of degree `ep` over the `dp_shard * cp * tp` ranks.
    pub fn with_ep(mut self, ep: usize) -> Result<Mesh, MeshError> {
        let over = self.size_of(AxisSet::INNER);
        if ep == 0 || !over.is_multiple_of(ep) {
            return Err(MeshError::EpNotDivisor { ep, over });
        }
        self.ep = ep;
        Ok(self)
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.sizes.iter().product()
    }

    /// Number of ranks along `axis`.
    pub const fn size(&self, axis: Axis) -> usize {
        match axis {
            Axis::Ep => self.ep,
            Axis::Efsdp => self.efsdp(),
            _ => self.sizes[axis.index()],
        }
    }

    /// Number of ranks of a group along `axes`.
    pub fn size_of(&self, axes: impl Into<AxisSet>) -> usize {
        axes.into().iter().map(|axis| self.size(axis)).product()
    }

    /// Expert parallel degree: the number of ranks over which the experts of a layer are sharded.
    pub const fn ep(&self) -> usize {
        self.ep
    }

    /// Number of ranks that hold and shard the same experts: `dp_shard * cp * tp / ep`.
    pub const fn efsdp(&self) -> usize {
        let [_, _, _, dp_shard, cp, tp] = self.sizes;
        dp_shard * cp * tp / self.ep
    }

    /// The axes with more than one rank. Sets that agree on these axes define the same groups.
    pub fn active(&self) -> AxisSet {
        Axis::ALL_WITH_EXPERT
            .into_iter()
            .filter(|&axis| self.size(axis) > 1)
            .collect()
    }

    /// The canonical set of axes with the same groups as `axes`, so that equal groups can be recognized. It has
    /// only active axes, and dense axes instead of expert axes where both define the same groups.
    pub fn canonical(&self, axes: impl Into<AxisSet>) -> AxisSet {
        let active = self.active();
        let axes = axes.into().intersection(active);
        let experts = AxisSet::EXPERT.intersection(active);
        match axes.intersection(AxisSet::EXPERT) {
            AxisSet::EMPTY => axes,
            found if found == experts => axes
                .intersection(AxisSet::EXPERT.complement())
                .union(AxisSet::INNER.intersection(active)),
            _ => axes,
        }
    }

    /// The coordinates of `rank`.
    pub fn coordinates(&self, rank: usize) -> Result<Coordinates, MeshError> {
        self.check_rank(rank)?;
        let mut coordinates = self.unflatten(rank, AxisSet::ALL);
        let as_experts = self.unflatten(rank, AxisSet::EXPERT.basis());
        for axis in AxisSet::EXPERT.iter() {
            coordinates = coordinates.with(axis, as_experts.get(axis));
        }
        Ok(coordinates)
    }

    /// The rank at `coordinates`.
    pub fn rank_at(&self, coordinates: &Coordinates) -> Result<usize, MeshError> {
        for axis in Axis::ALL {
            let (coordinate, size) = (coordinates.get(axis), self.size(axis));
            if coordinate >= size {
                return Err(MeshError::CoordinateOutOfRange {
                    axis,
                    coordinate,
                    size,
                });
            }
        }
        Ok(self.flatten(coordinates, AxisSet::ALL))
    }

    /// The ranks that differ from `rank` only along `axes`, `rank` included, in ascending order.
    pub fn group(&self, rank: usize, axes: impl Into<AxisSet>) -> Result<Vec<usize>, MeshError> {
        let (axes, coordinates) = (axes.into(), self.coordinates(rank)?);
        if axes.is_mixed() {
            Err(MeshError::MixedAxes { axes })
        } else {
            Ok(self.members(coordinates, axes))
        }
    }

    /// The index of `rank` in its group along `axes`.
    pub fn index_in_group(
        &self,
        rank: usize,
        axes: impl Into<AxisSet>,
    ) -> Result<usize, MeshError> {
        Ok(self.flatten(&self.coordinates(rank)?, axes.into()))
    }

    /// All groups along `axes`, in order of their first rank: a partition of the world.
    pub fn groups(&self, axes: impl Into<AxisSet>) -> impl Iterator<Item = Vec<usize>> + '_ {
        let axes = axes.into();
        let others = axes.complement();
        (0..self.size_of(others))
            .map(move |group| self.members(self.unflatten(group, others), axes))
    }

    /// The expert parallel group of `rank`: the ranks over which it dispatches tokens, in ascending order.
    pub fn expert_group(&self, rank: usize) -> Result<Vec<usize>, MeshError> {
        self.group(rank, Axis::Ep)
    }

    /// The ranks that shard the same experts as `rank`, in ascending order.
    pub fn expert_shard_group(&self, rank: usize) -> Result<Vec<usize>, MeshError> {
        self.group(rank, Axis::Efsdp)
    }

    /// The index of `rank` in its expert parallel group.
    pub fn expert_index(&self, rank: usize) -> Result<usize, MeshError> {
        self.index_in_group(rank, Axis::Ep)
    }

    /// The index of `rank` in its expert shard group.
    pub fn expert_shard_index(&self, rank: usize) -> Result<usize, MeshError> {
        self.index_in_group(rank, Axis::Efsdp)
    }

    /// Number of ranks of an expert parallel group per node, if the group spans several nodes with
    /// `ranks_per_node` ranks each; none if it fits on one node or does not divide evenly over nodes.
    pub fn ep_ranks_per_node(&self, ranks_per_node: usize) -> Option<usize> {
        let spans_nodes = ranks_per_node > 0 && ranks_per_node < self.ep;
        let is_even = spans_nodes && self.ep.is_multiple_of(ranks_per_node);
        is_even.then_some(ranks_per_node)
    }

    fn check_rank(&self, rank: usize) -> Result<(), MeshError> {
        let world_size = self.world_size();
        if rank < world_size {
            Ok(())
        } else {
            Err(MeshError::RankOutOfRange { rank, world_size })
        }
    }

    fn members(&self, mut at: Coordinates, axes: AxisSet) -> Vec<usize> {
        (0..self.size_of(axes))
            .map(|index| {
                let moved = self.unflatten(index, axes);
                for axis in axes.iter() {
                    at = at.with(axis, moved.get(axis));
                }
                self.flatten(&at, axes.basis())
            })
            .collect()
    }

    /// The row-major index of `coordinates` over `axes` only.
    fn flatten(&self, coordinates: &Coordinates, axes: AxisSet) -> usize {
        axes.iter().fold(0, |index, axis| {
            index * self.size(axis) + coordinates.get(axis)
        })
    }

    /// The inverse of `flatten`; coordinates along other axes are 0.
    fn unflatten(&self, mut index: usize, axes: AxisSet) -> Coordinates {
        let mut coordinates = Coordinates::default();
        for axis in axes.iter().rev() {
            coordinates = coordinates.with(axis, index % self.size(axis));
            index /= self.size(axis);
        }
        coordinates
    }
}

impl fmt::Display for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut factors: Vec<String> = self
            .active()
            .intersection(AxisSet::ALL)
            .iter()
            .map(|axis| format!("{axis}{}", self.size(axis)))
            .collect();
        if factors.is_empty() {
            factors.push("1 rank".to_owned());
        }
        f.write_str(&factors.join(" x "))?;
        if self.ep > 1 {
            write!(f, " (ep{})", self.ep)?;
        }
        Ok(())
    }
}

impl fmt::Display for Coordinates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let coordinates = Axis::ALL.map(|axis| format!("{axis} {}", self.get(axis)));
        f.write_str(&coordinates.join(", "))
    }
}

impl Serialize for Mesh {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(Axis::COUNT + 1))?;
        for axis in Axis::ALL {
            map.serialize_entry(&axis, &self.size(axis))?;
        }
        map.serialize_entry("ep", &self.ep)?;
        map.end()
    }
}

impl<'de> Deserialize<'de> for Mesh {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Mesh, D::Error> {
        let mut sizes = BTreeMap::<String, usize>::deserialize(deserializer)?;
        let ep = sizes.remove("ep").unwrap_or(1);
        let sizes: Result<Vec<_>, MeshError> = sizes
            .into_iter()
            .map(|(name, size)| Ok((name.parse()?, size)))
            .collect();
        sizes
            .and_then(|sizes| Mesh::new(&sizes)?.with_ep(ep))
            .map_err(de::Error::custom)
    }
}

//! Ranks as points of a grid.
//!
//! A rank is its coordinates read as digits, outermost axis first, so the ranks of a group in mesh
//! order ascend. Nothing is stored but the sizes: a question about one rank costs at most the size
//! of the group it asks for.

use std::{collections::BTreeMap, fmt};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de, ser::SerializeMap};

use crate::{Axis, AxisSet, MeshError};

/// The ranks of a job, laid out along five axes, with experts laid over the inner three.
#[derive(Clone, Debug, Eq, PartialEq, Hash)]
pub struct Mesh {
    sizes: [usize; Axis::COUNT],
    ep: usize,
}

/// Where a rank stands: one number per axis, those of experts too.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq, Hash)]
pub struct Coordinates([usize; Axis::EVERY_COUNT]);

impl Coordinates {
    /// The coordinate along `axis`.
    pub const fn get(&self, axis: Axis) -> usize {
        self.0[axis.index()]
    }

    /// The same place, but for `coordinate` along `axis`.
    #[must_use]
    pub const fn with(mut self, axis: Axis, coordinate: usize) -> Coordinates {
        self.0[axis.index()] = coordinate;
        self
    }
}

impl Mesh {
    /// A mesh with these sizes; axes not named have size 1.
    pub fn new(sizes: &[(Axis, usize)]) -> Result<Mesh, MeshError> {
        let mut all = [1; Axis::COUNT];
        let mut seen = AxisSet::EMPTY;
        for &(axis, size) in sizes {
            if size == 0 {
                return Err(MeshError::EmptyAxis { axis });
            }
            if AxisSet::EXPERT.contains(axis) {
                return Err(MeshError::LaidOver { axis });
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

    /// The same mesh with expert parallelism of size `ep` laid over `dp_shard * cp * tp`.
    pub fn with_ep(mut self, ep: usize) -> Result<Mesh, MeshError> {
        let over = self.size_of(AxisSet::INNER);
        if ep == 0 || !over.is_multiple_of(ep) {
            return Err(MeshError::ExpertsDoNotDivide { ep, over });
        }
        self.ep = ep;
        Ok(self)
    }

    /// How many ranks there are.
    pub fn world_size(&self) -> usize {
        self.sizes.iter().product()
    }

    /// How many ranks lie along `axis`.
    pub const fn size(&self, axis: Axis) -> usize {
        match axis {
            Axis::Ep => self.ep,
            Axis::Efsdp => self.efsdp(),
            _ => self.sizes[axis.index()],
        }
    }

    /// How many ranks a group along `axes` has.
    pub fn size_of(&self, axes: impl Into<AxisSet>) -> usize {
        axes.into().iter().map(|axis| self.size(axis)).product()
    }

    /// How many ranks share the experts of one layer.
    pub const fn ep(&self) -> usize {
        self.ep
    }

    /// How many ranks shard the same experts: `dp_shard * cp * tp / ep`.
    pub const fn efsdp(&self) -> usize {
        let [_, _, dp_shard, cp, tp] = self.sizes;
        dp_shard * cp * tp / self.ep
    }

    /// The axes with more than one rank. Groups along sets that agree on these are the same.
    pub fn active(&self) -> AxisSet {
        Axis::EVERY
            .into_iter()
            .filter(|&axis| self.size(axis) > 1)
            .collect()
    }

    /// The same groups in fewest words, so that sets along which they are the same can be told: active
    /// axes alone, and those of a rank's place where all of what experts are laid over is meant.
    pub fn simplest(&self, axes: impl Into<AxisSet>) -> AxisSet {
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

    /// Where `rank` stands.
    pub fn coordinates(&self, rank: usize) -> Result<Coordinates, MeshError> {
        self.check_rank(rank)?;
        let mut coordinates = self.place(rank, AxisSet::ALL);
        let as_experts = self.place(rank, AxisSet::EXPERT.system());
        for axis in AxisSet::EXPERT.iter() {
            coordinates = coordinates.with(axis, as_experts.get(axis));
        }
        Ok(coordinates)
    }

    /// The rank that stands at `coordinates`.
    pub fn rank_at(&self, coordinates: &Coordinates) -> Result<usize, MeshError> {
        for axis in Axis::ALL {
            let (coordinate, size) = (coordinates.get(axis), self.size(axis));
            if coordinate >= size {
                return Err(MeshError::CoordinateOutside {
                    axis,
                    coordinate,
                    size,
                });
            }
        }
        Ok(self.number(coordinates, AxisSet::ALL))
    }

    /// The ranks that differ from `rank` only along `axes`, itself included, ascending.
    pub fn group(&self, rank: usize, axes: impl Into<AxisSet>) -> Result<Vec<usize>, MeshError> {
        let (axes, coordinates) = (axes.into(), self.coordinates(rank)?);
        match axes.is_mixed() {
            false => Ok(self.members(coordinates, axes)),
            true => Err(MeshError::CountedTwice { axes }),
        }
    }

    /// The position of `rank` in its group along `axes`.
    pub fn index_in_group(
        &self,
        rank: usize,
        axes: impl Into<AxisSet>,
    ) -> Result<usize, MeshError> {
        Ok(self.number(&self.coordinates(rank)?, axes.into()))
    }

    /// Every group along `axes`, by ascending first rank: a partition of the world.
    pub fn groups(&self, axes: impl Into<AxisSet>) -> impl Iterator<Item = Vec<usize>> + '_ {
        let axes = axes.into();
        let others = axes.complement();
        (0..self.size_of(others)).map(move |group| self.members(self.place(group, others), axes))
    }

    /// The ranks among which the experts that `rank` routes to are divided, ascending.
    pub fn expert_group(&self, rank: usize) -> Result<Vec<usize>, MeshError> {
        self.group(rank, Axis::Ep)
    }

    /// The ranks that shard the same experts as `rank`, ascending.
    pub fn expert_shard_group(&self, rank: usize) -> Result<Vec<usize>, MeshError> {
        self.group(rank, Axis::Efsdp)
    }

    /// The position of `rank` in its expert group.
    pub fn expert_index(&self, rank: usize) -> Result<usize, MeshError> {
        self.index_in_group(rank, Axis::Ep)
    }

    /// The position of `rank` in its expert shard group.
    pub fn expert_shard_index(&self, rank: usize) -> Result<usize, MeshError> {
        self.index_in_group(rank, Axis::Efsdp)
    }

    /// How many ranks of an expert group are on one machine, where machines of `per_machine` ranks each hold
    /// several whole parts of it; none where one machine has it all, or machines cut across.
    pub fn experts_on_machine(&self, per_machine: usize) -> Option<usize> {
        let is_cut = per_machine > 0 && per_machine < self.ep;
        let is_whole = is_cut && self.ep.is_multiple_of(per_machine);
        is_whole.then_some(per_machine)
    }

    fn check_rank(&self, rank: usize) -> Result<(), MeshError> {
        let world_size = self.world_size();
        if rank < world_size {
            Ok(())
        } else {
            Err(MeshError::RankOutside { rank, world_size })
        }
    }

    fn members(&self, mut at: Coordinates, axes: AxisSet) -> Vec<usize> {
        (0..self.size_of(axes))
            .map(|index| {
                let moved = self.place(index, axes);
                for axis in axes.iter() {
                    at = at.with(axis, moved.get(axis));
                }
                self.number(&at, axes.system())
            })
            .collect()
    }

    /// Coordinates as digits of a number, over `axes` only.
    fn number(&self, coordinates: &Coordinates, axes: AxisSet) -> usize {
        axes.iter().fold(0, |number, axis| {
            number * self.size(axis) + coordinates.get(axis)
        })
    }

    /// The inverse of `number`; axes outside `axes` stand at 0.
    fn place(&self, mut number: usize, axes: AxisSet) -> Coordinates {
        let mut coordinates = Coordinates::default();
        for axis in axes.iter().rev() {
            coordinates = coordinates.with(axis, number % self.size(axis));
            number /= self.size(axis);
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
        let places = Axis::ALL.map(|axis| format!("{axis} {}", self.get(axis)));
        f.write_str(&places.join(", "))
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

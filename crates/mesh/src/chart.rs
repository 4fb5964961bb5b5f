//! A job drawn: where every rank stands, which experts it has, and who works together on what.

use std::{fmt, ops::Range};

use crate::{Axis, AxisSet, Mesh, MeshError};

/// Ranks that are listed one by one.
const MOST_RANKS: usize = 32;

/// Groups that are listed of a role.
const MOST_GROUPS: usize = 8;

/// Experts that are drawn one by one.
const MOST_EXPERTS: usize = 16;

/// A job as far as its mesh tells it.
#[derive(Clone, Debug)]
pub struct Chart {
    mesh: Mesh,
    /// Of a layer; none where the model has none.
    num_experts: usize,
    /// Whether ranks that have the same share its states.
    is_sharded: bool,
}

/// Something that ranks do together.
#[derive(Copy, Clone, Debug, Eq, PartialEq, Hash)]
pub enum Role {
    /// Rows of tokens go to the experts they are for, and back.
    RowsToExperts,
    /// Gradients of experts are added up.
    ExpertGradients,
    /// Gradients of everything else are added up.
    OtherGradients,
    /// Each has a part of the optimiser's states of the same experts, and more in later stages of ZeRO.
    ExpertStates,
    /// The same of everything else.
    OtherStates,
    /// Each computes a part of every matrix product.
    Matrices,
    /// Each has a part of every sequence.
    Sequences,
    /// Each has some layers, and hands on what it computed.
    Layers,
}

impl Role {
    /// The axes along which ranks do it.
    pub fn axes(self) -> AxisSet {
        match self {
            Role::RowsToExperts => Axis::Ep.into(),
            Role::ExpertGradients => AxisSet::of([Axis::DpReplicate, Axis::Efsdp]),
            Role::OtherGradients => AxisSet::of([Axis::DpReplicate, Axis::DpShard, Axis::Cp]),
            Role::ExpertStates => Axis::Efsdp.into(),
            Role::OtherStates => AxisSet::of([Axis::DpShard, Axis::Cp]),
            Role::Matrices => Axis::Tp.into(),
            Role::Sequences => Axis::Cp.into(),
            Role::Layers => Axis::Pp.into(),
        }
    }

    const fn words(self) -> &'static str {
        match self {
            Role::RowsToExperts => "rows go to their experts and back",
            Role::ExpertGradients => "gradients of experts are added up",
            Role::OtherGradients => "gradients of the rest are added up",
            Role::ExpertStates => "states of experts are shared",
            Role::OtherStates => "states of the rest are shared",
            Role::Matrices => "matrices are shared",
            Role::Sequences => "sequences are shared",
            Role::Layers => "layers are shared",
        }
    }
}

impl Chart {
    /// A job with `num_experts` experts in a layer, zero if it has none, whose states are sharded or not.
    pub fn new(mesh: Mesh, num_experts: usize, is_sharded: bool) -> Chart {
        Chart {
            mesh,
            num_experts,
            is_sharded,
        }
    }

    /// Which experts of every layer `rank` has.
    pub fn experts_of(&self, rank: usize) -> Result<Range<usize>, MeshError> {
        let each = self.num_experts / self.mesh.ep();
        let index = self.mesh.expert_index(rank)?;
        Ok(index * each..(index + 1) * each)
    }

    /// What ranks do together here, and in which groups.
    pub fn roles(&self) -> Vec<(Role, Vec<Vec<usize>>)> {
        let has_experts = self.num_experts > 0;
        let mut roles = Vec::new();
        if has_experts {
            roles.extend([Role::RowsToExperts, Role::ExpertGradients]);
        }
        roles.push(Role::OtherGradients);
        if self.is_sharded {
            roles.extend(has_experts.then_some(Role::ExpertStates));
            roles.push(Role::OtherStates);
        }
        roles.extend([Role::Matrices, Role::Sequences, Role::Layers]);
        let several = |role: &Role| self.mesh.size_of(role.axes()) > 1 || role.is_always_told();
        let groups = |role: Role| (role, self.mesh.groups(role.axes()).collect());
        roles.into_iter().filter(several).map(groups).collect()
    }

    /// The axes of a rank's place that have several ranks, and those of experts where there are some.
    fn columns(&self) -> Vec<Axis> {
        let mut axes: Vec<Axis> = Axis::ALL
            .into_iter()
            .filter(|&axis| self.mesh.size(axis) > 1)
            .collect();
        if self.num_experts > 0 {
            axes.extend([Axis::Efsdp, Axis::Ep]);
        }
        axes
    }

    fn write_ranks(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.columns();
        write!(f, "  rank")?;
        for axis in &columns {
            write!(f, "  {axis}")?;
        }
        match self.num_experts {
            0 => writeln!(f)?,
            _ => writeln!(f, "  experts")?,
        }
        let num_ranks = self.mesh.world_size();
        for rank in 0..num_ranks.min(MOST_RANKS) {
            let place = self.mesh.coordinates(rank).map_err(|_| fmt::Error)?;
            write!(f, "  {rank:>4}")?;
            for axis in &columns {
                write!(f, "  {:>1$}", place.get(*axis), axis.name().len())?;
            }
            if self.num_experts > 0 {
                write!(f, "  {}", self.drawn_experts(rank)?)?;
            }
            writeln!(f)?;
        }
        if num_ranks > MOST_RANKS {
            writeln!(f, "  ... and {} more", num_ranks - MOST_RANKS)?;
        }
        Ok(())
    }

    /// A number where an expert is and a dot where one is not; an interval where they are many.
    fn drawn_experts(&self, rank: usize) -> Result<String, fmt::Error> {
        let own = self.experts_of(rank).map_err(|_| fmt::Error)?;
        if self.num_experts > MOST_EXPERTS {
            return Ok(format!("{} to {}", own.start, own.end.saturating_sub(1)));
        }
        let drawn = (0..self.num_experts).map(|expert| match own.contains(&expert) {
            true => expert.to_string(),
            false => ".".repeat(expert.to_string().len()),
        });
        Ok(drawn.collect::<Vec<_>>().join(" "))
    }

    fn write_roles(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (role, groups) in self.roles() {
            let axes = role.axes().intersection(self.mesh.active());
            let along = match axes {
                AxisSet::EMPTY => "each alone".to_owned(),
                axes => axes.to_string(),
            };
            let mut drawn: Vec<String> =
                groups.iter().take(MOST_GROUPS).map(|g| braced(g)).collect();
            if groups.len() > MOST_GROUPS {
                drawn.push(format!("... and {} more", groups.len() - MOST_GROUPS));
            }
            writeln!(f, "  {:<35} {along:<22} {}", role.words(), drawn.join(" "))?;
        }
        Ok(())
    }
}

impl Role {
    /// Gradients are always somebody's question: that a rank's stay its own is an answer.
    const fn is_always_told(self) -> bool {
        matches!(self, Role::ExpertGradients | Role::OtherGradients)
    }
}

/// `{0 1 2 3}`, or `{0 8 .. 56}` where they are many.
fn braced(ranks: &[usize]) -> String {
    match ranks {
        [first, second, .., last] if ranks.len() > MOST_GROUPS => {
            format!("{{{first} {second} .. {last}}}")
        }
        _ => {
            let all: Vec<String> = ranks.iter().map(ToString::to_string).collect();
            format!("{{{}}}", all.join(" "))
        }
    }
}

impl fmt::Display for Chart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on {} ranks", self.mesh, self.mesh.world_size())?;
        match self.num_experts {
            0 => writeln!(f)?,
            number => writeln!(f, ", {number} experts in a layer")?,
        }
        self.write_ranks(f)?;
        self.write_roles(f)
    }
}

//! Text diagram of a job: the coordinates of every rank, its experts, and the process groups by role.

use std::{fmt, ops::Range};

use crate::{Axis, AxisSet, Mesh, MeshError};

/// Number of ranks listed before the table is abbreviated.
const MAX_LISTED_RANKS: usize = 32;

/// Number of groups listed per role, and of ranks listed per group, before they are abbreviated.
const MAX_LISTED_GROUPS: usize = 8;

/// Number of experts drawn one by one; larger numbers are drawn as an interval.
const MAX_LISTED_EXPERTS: usize = 16;

/// A printable diagram of the ranks, experts and process groups of a job.
#[derive(Clone, Debug)]
pub struct MeshDiagram {
    mesh: Mesh,
    /// Experts per layer; zero for a dense model.
    num_experts: usize,
    /// Whether data-parallel ranks shard the model states (ZeRO).
    is_sharded: bool,
}

/// What a process group is used for.
#[derive(Copy, Clone, Debug, Eq, PartialEq, Hash)]
pub enum Role {
    /// All-to-all of tokens to their experts and back.
    ExpertDispatch,
    /// Reduction of the gradients of expert parameters.
    ExpertGradients,
    /// Reduction of the gradients of all other parameters.
    DenseGradients,
    /// Sharding of the states of expert parameters: optimizer states, and with later ZeRO stages more.
    ExpertStates,
    /// Sharding of the states of all other parameters.
    DenseStates,
    /// Tensor parallelism: each rank computes a shard of every matrix product.
    TensorParallel,
    /// Context parallelism: each rank processes a part of every sequence.
    ContextParallel,
    /// Pipeline parallelism: each rank holds some layers and sends its activations to the next stage.
    PipelineParallel,
}

impl Role {
    /// The axes along which the groups of this role run.
    pub fn axes(self) -> AxisSet {
        match self {
            Role::ExpertDispatch => Axis::Ep.into(),
            Role::ExpertGradients => AxisSet::of([Axis::DpReplicate, Axis::Efsdp]),
            Role::DenseGradients => AxisSet::of([Axis::DpReplicate, Axis::DpShard, Axis::Cp]),
            Role::ExpertStates => Axis::Efsdp.into(),
            Role::DenseStates => AxisSet::of([Axis::DpShard, Axis::Cp]),
            Role::TensorParallel => Axis::Tp.into(),
            Role::ContextParallel => Axis::Cp.into(),
            Role::PipelineParallel => Axis::Pp.into(),
        }
    }

    const fn description(self) -> &'static str {
        match self {
            Role::ExpertDispatch => "expert token all-to-all",
            Role::ExpertGradients => "expert gradient reduction",
            Role::DenseGradients => "dense gradient reduction",
            Role::ExpertStates => "expert state sharding",
            Role::DenseStates => "dense state sharding",
            Role::TensorParallel => "tensor parallel",
            Role::ContextParallel => "context parallel",
            Role::PipelineParallel => "pipeline parallel",
        }
    }
}

impl MeshDiagram {
    /// A diagram of a job with `num_experts` experts per layer, zero for a dense model.
    pub fn new(mesh: Mesh, num_experts: usize, is_sharded: bool) -> MeshDiagram {
        MeshDiagram {
            mesh,
            num_experts,
            is_sharded,
        }
    }

    /// The experts of every layer that `rank` holds.
    pub fn experts_of(&self, rank: usize) -> Result<Range<usize>, MeshError> {
        let each = self.num_experts / self.mesh.ep();
        let index = self.mesh.expert_index(rank)?;
        Ok(index * each..(index + 1) * each)
    }

    /// The roles that this job has, each with its process groups.
    pub fn roles(&self) -> Vec<(Role, Vec<Vec<usize>>)> {
        let has_experts = self.num_experts > 0;
        let mut roles = Vec::new();
        if has_experts {
            roles.extend([Role::ExpertDispatch, Role::ExpertGradients]);
        }
        roles.push(Role::DenseGradients);
        if self.is_sharded {
            roles.extend(has_experts.then_some(Role::ExpertStates));
            roles.push(Role::DenseStates);
        }
        roles.extend([
            Role::TensorParallel,
            Role::ContextParallel,
            Role::PipelineParallel,
        ]);
        let several = |role: &Role| self.mesh.size_of(role.axes()) > 1 || role.is_always_shown();
        let groups = |role: Role| (role, self.mesh.groups(role.axes()).collect());
        roles.into_iter().filter(several).map(groups).collect()
    }

    /// The axes with more than one rank, and those of expert parallelism if the model has experts.
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
        for rank in 0..num_ranks.min(MAX_LISTED_RANKS) {
            let coordinates = self.mesh.coordinates(rank).map_err(|_| fmt::Error)?;
            write!(f, "  {rank:>4}")?;
            for axis in &columns {
                write!(f, "  {:>1$}", coordinates.get(*axis), axis.name().len())?;
            }
            if self.num_experts > 0 {
                write!(f, "  {}", self.format_experts(rank)?)?;
            }
            writeln!(f)?;
        }
        if num_ranks > MAX_LISTED_RANKS {
            writeln!(f, "  ... and {} more", num_ranks - MAX_LISTED_RANKS)?;
        }
        Ok(())
    }

    /// Numbers for the experts that `rank` holds and dots for the others, or an interval if there are many experts.
    fn format_experts(&self, rank: usize) -> Result<String, fmt::Error> {
        let own = self.experts_of(rank).map_err(|_| fmt::Error)?;
        if self.num_experts > MAX_LISTED_EXPERTS {
            return Ok(format!("{} to {}", own.start, own.end.saturating_sub(1)));
        }
        let drawn = (0..self.num_experts).map(|expert| {
            if own.contains(&expert) {
                expert.to_string()
            } else {
                ".".repeat(expert.to_string().len())
            }
        });
        Ok(drawn.collect::<Vec<_>>().join(" "))
    }

    fn write_roles(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (role, groups) in self.roles() {
            let axes = role.axes().intersection(self.mesh.active());
            let along = axes.to_string();
            let mut drawn: Vec<String> = groups
                .iter()
                .take(MAX_LISTED_GROUPS)
                .map(|g| format_group(g))
                .collect();
            if groups.len() > MAX_LISTED_GROUPS {
                drawn.push(format!("... and {} more", groups.len() - MAX_LISTED_GROUPS));
            }
            writeln!(
                f,
                "  {:<26} {along:<22} {}",
                role.description(),
                drawn.join(" ")
            )?;
        }
        Ok(())
    }
}

impl Role {
    /// Whether the role is listed even if its groups have one rank: the reader of a diagram always asks where
    /// gradients are reduced.
    const fn is_always_shown(self) -> bool {
        matches!(self, Role::ExpertGradients | Role::DenseGradients)
    }
}

/// `{0 1 2 3}`, or `{0 8 .. 56}` for a large group.
fn format_group(ranks: &[usize]) -> String {
    match ranks {
        [first, second, .., last] if ranks.len() > MAX_LISTED_GROUPS => {
            format!("{{{first} {second} .. {last}}}")
        }
        _ => {
            let all: Vec<String> = ranks.iter().map(ToString::to_string).collect();
            format!("{{{}}}", all.join(" "))
        }
    }
}

impl fmt::Display for MeshDiagram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.mesh.world_size() {
            1 => write!(f, "{} on 1 rank", self.mesh)?,
            size => write!(f, "{} on {size} ranks", self.mesh)?,
        }
        match self.num_experts {
            0 => writeln!(f)?,
            number => writeln!(f, ", {number} experts per layer")?,
        }
        self.write_ranks(f)?;
        self.write_roles(f)
    }
}

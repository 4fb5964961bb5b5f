//! Initialization: joining the world of ranks.

use std::time::Duration;

use crate::config::CommSection;
use crate::torch::{Backend, Rendezvous};
use crate::{Axis, Ledger, Mesh, Result, World};

/// Joins the ranks that the launcher started, with all ranks along the mesh axis `dp_replicate`.
///
/// Rank, world size and store address come from the environment variables of `trainyard run` or torchrun.
/// Without them this process is a world of one rank, so that a program also runs without a launcher. The
/// backend is NCCL if this node has a GPU, and Gloo otherwise.
pub fn init() -> Result<World> {
    init_along(Axis::DpReplicate)
}

/// As [`init`], with all ranks along another axis, such as `dp_shard` for FSDP.
pub fn init_along(axis: Axis) -> Result<World> {
    let at = rendezvous()?;
    join(Mesh::new(&[(axis, at.world_size)])?, &at)
}

/// As [`init`], with a mesh of several axes. The product of their sizes must be the world size.
///
/// ```no_run
/// # use trainyard::Axis;
/// // torch.distributed.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp_replicate", "dp_shard"))
/// let world = trainyard::init_mesh(&[(Axis::DpReplicate, 2), (Axis::DpShard, 4)])?;
/// let replicas = world.group(Axis::DpReplicate)?;
/// # Ok::<(), trainyard::Error>(())
/// ```
///
/// `ep` regroups the ranks of `dp_shard`, `cp` and `tp`, so it is not part of the product: with
/// `(Axis::DpShard, 4), (Axis::Ep, 2)` there are four ranks.
pub fn init_mesh(sizes: &[(Axis, usize)]) -> Result<World> {
    let (ep, sizes): (Vec<_>, Vec<_>) = sizes.iter().partition(|(axis, _)| *axis == Axis::Ep);
    let ep = ep.first().map_or(1, |&(_, size)| size);
    join(Mesh::new(&sizes)?.with_ep(ep)?, &rendezvous()?)
}

fn rendezvous() -> Result<Rendezvous> {
    let timeout = Duration::from_secs(CommSection::default().init_timeout_seconds);
    Ok(Rendezvous::from_env(timeout)?)
}

fn join(mesh: Mesh, at: &Rendezvous) -> Result<World> {
    // One thread per rank unless `OMP_NUM_THREADS` is set, because ranks share the cores of the host.
    if at.world_size > 1 && std::env::var_os("OMP_NUM_THREADS").is_none() {
        tch::set_num_threads(1);
    }
    Ok(World::join(
        mesh,
        Backend::auto(),
        at,
        Ledger::new(at.rank),
    )?)
}

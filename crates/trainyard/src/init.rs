//! Finding the other ranks.

use std::time::Duration;

use crate::config::CommSection;
use crate::torch::{Backend, Rendezvous};
use crate::{Axis, Ledger, Mesh, Result, World};

/// Joins the ranks that the launcher started, all of them along `dp_replicate`.
///
/// The launcher's environment says who they are: that of `trainyard run`, or of torchrun. Without it
/// this process is a world of one, so that a program runs alone as well. Gloo carries the messages;
/// for NCCL call [`World::join`] with that backend.
pub fn init() -> Result<World> {
    init_along(Axis::DpReplicate)
}

/// The same, all of them along another axis: `dp_shard` for sharded states.
pub fn init_along(axis: Axis) -> Result<World> {
    let at = rendezvous()?;
    join(Mesh::new(&[(axis, at.world_size)])?, &at)
}

/// The same along several axes, whose sizes multiply to the number of ranks.
///
/// ```no_run
/// # use trainyard::Axis;
/// // torch.distributed.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp_replicate", "dp_shard"))
/// let world = trainyard::init_mesh(&[(Axis::DpReplicate, 2), (Axis::DpShard, 4)])?;
/// let replicas = world.group(Axis::DpReplicate)?;
/// # Ok::<(), trainyard::Error>(())
/// ```
///
/// `ep` counts the ranks of `dp_shard`, `cp` and `tp` a second time, and multiplies nothing: with
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
    // One thread per rank unless told: ranks share the machine.
    if at.world_size > 1 && std::env::var_os("OMP_NUM_THREADS").is_none() {
        tch::set_num_threads(1);
    }
    Ok(World::join(mesh, Backend::Gloo, at, Ledger::new(at.rank))?)
}

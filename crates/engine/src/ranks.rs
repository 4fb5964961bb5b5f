//! Starting ranks of this very program on this machine, and joining them.

use std::ffi::OsString;
use std::time::Duration;

use trainyard_config::{Backend as Named, Config};
use trainyard_elastic::{Console, Job, launch};
use trainyard_mesh::Mesh;
use trainyard_torch::{Backend, Rendezvous, World};
use trainyard_trace::Ledger;

use crate::error::{EngineError, Result};

/// Runs `trainyard-engine ARGS` on `nproc` ranks and waits for all of them.
pub fn run_locally(nproc: usize, args: &[OsString], console: Console) -> Result<()> {
    let engine = std::env::current_exe().map_err(|source| EngineError::Io {
        path: "trainyard-engine".into(),
        source,
    })?;
    let mut job = Job::new(&engine, nproc).args(args).console(console);
    // Whoever started this waits for it.
    job.hang_timeout = None;
    // The front door starts faster than this program; use it where it is.
    let front_door = engine.with_file_name("trainyard");
    if front_door.is_file() {
        job = job.trampoline(front_door);
    }
    let outcome = launch(&job)?;
    match outcome.is_success() {
        true => Ok(()),
        false => Err(EngineError::Rank(
            outcome
                .report()
                .unwrap_or_else(|| "a rank failed".to_owned()),
        )),
    }
}

/// This rank's world, as the launcher's environment says.
pub fn join(config: &Config, ledger: impl FnOnce(usize) -> Ledger) -> Result<World> {
    let at = Rendezvous::from_env(Duration::from_secs(config.comm.init_timeout_seconds))?;
    let mesh = config.mesh(at.world_size)?;
    join_mesh(mesh, backend(config), &at, ledger)
}

/// The same for a mesh of its own.
pub fn join_mesh(
    mesh: Mesh,
    backend: Backend,
    at: &Rendezvous,
    ledger: impl FnOnce(usize) -> Ledger,
) -> Result<World> {
    // One thread per rank unless told: ranks share the machine.
    if std::env::var_os("OMP_NUM_THREADS").is_none() && at.world_size > 1 {
        tch::set_num_threads(1);
    }
    Ok(World::join(mesh, backend, at, ledger(at.rank))?)
}

fn backend(config: &Config) -> Backend {
    match config.comm.backend {
        Named::Nccl => Backend::Nccl,
        Named::Gloo | Named::Fake => Backend::Gloo,
    }
}

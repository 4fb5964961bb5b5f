//! Starts ranks of this program on this host, and joins the world of a rank.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use trainyard_config::{Backend as Named, Config, Workers};
use trainyard_launcher::{Console, Job, find_program, launch};
use trainyard_mesh::Mesh;
use trainyard_torch::{Backend, Rendezvous, World};
use trainyard_trace::Ledger;

use crate::error::{EngineError, Result};

/// Runs `trainyard-engine ARGS` on `nproc` local ranks and waits for all of them.
pub fn run_locally(nproc: usize, args: &[OsString], console: Console) -> Result<()> {
    let engine = std::env::current_exe().map_err(|source| EngineError::Io {
        path: "trainyard-engine".into(),
        source,
    })?;
    let mut job = Job::new(&engine, nproc).args(args).console(console);
    // These commands run in the foreground: the user can stop a hung one.
    job.hang_timeout = None;
    // `trainyard` starts faster than this program because it does not load libtorch.
    let cli = engine.with_file_name("trainyard");
    if cli.is_file() {
        job = job.trampoline(cli);
    }
    let outcome = launch(&job)?;
    if outcome.is_success() {
        Ok(())
    } else {
        Err(EngineError::Rank(
            outcome
                .report()
                .unwrap_or_else(|| "a rank failed".to_owned()),
        ))
    }
}

/// Runs `trainyard-engine ARGS` as parameter servers and as workers on this host, and waits for all of them.
pub fn run_served_locally(num_servers: usize, workers: Workers, args: &[OsString]) -> Result<()> {
    let engine = std::env::current_exe().map_err(|source| EngineError::Io {
        path: "trainyard-engine".into(),
        source,
    })?;
    let launcher = launcher_of(&engine)?;
    let output = Command::new(&launcher)
        .args(["run", "--servers", &num_servers.to_string()])
        .args([
            "--nproc-per-node",
            &(workers.num * workers.ranks_each).to_string(),
        ])
        .args(["--nproc-per-worker", &workers.ranks_each.to_string(), "--"])
        .arg(&engine)
        .args(args)
        .output()
        .map_err(|source| EngineError::Io {
            path: launcher,
            source,
        })?;
    // The others go on without a worker that has failed.
    let errors = String::from_utf8_lossy(&output.stderr);
    let warnings = errors.lines().filter(|line| line.starts_with("warning:"));
    warnings.for_each(|warning| eprintln!("{warning}"));
    if output.status.success() {
        return Ok(());
    }
    let report = [output.stdout, output.stderr].concat();
    Err(EngineError::Rank(
        String::from_utf8_lossy(&report).into_owned(),
    ))
}

/// The program whose command `run` starts parameter servers.
fn launcher_of(engine: &Path) -> Result<PathBuf> {
    let beside = engine.with_file_name("trainyard");
    if beside.is_file() {
        return Ok(beside);
    }
    let on_path = find_program(Path::new("trainyard"), std::env::var_os("PATH").as_deref());
    on_path.ok_or_else(|| {
        EngineError::Rank(format!(
            "`trainyard run` starts parameter servers, but trainyard is neither in the folder of {} nor on PATH",
            engine.display()
        ))
    })
}

/// Joins the world that the environment of the launcher describes, with the mesh of the config.
pub fn join(config: &Config, ledger: impl FnOnce(usize) -> Ledger) -> Result<World> {
    let at = Rendezvous::from_env(Duration::from_secs(config.comm.init_timeout_seconds))?;
    let mesh = config.mesh(at.world_size)?;
    let world = join_mesh(mesh, backend(config), &at, ledger)?;
    Ok(if config.comm.shared_memory {
        world
    } else {
        world.without_shared_memory()
    })
}

/// As [`join`], with a given mesh and backend.
pub fn join_mesh(
    mesh: Mesh,
    backend: Backend,
    at: &Rendezvous,
    ledger: impl FnOnce(usize) -> Ledger,
) -> Result<World> {
    // One thread per rank unless `OMP_NUM_THREADS` is set, because ranks share the cores of the host.
    if std::env::var_os("OMP_NUM_THREADS").is_none() && at.world_size > 1 {
        tch::set_num_threads(1);
    }
    Ok(World::join(mesh, backend, at, ledger(at.rank))?)
}

fn backend(config: &Config) -> Backend {
    match config.comm.backend {
        Named::Auto => Backend::auto(),
        Named::Nccl => Backend::Nccl,
        Named::Gloo | Named::Fake => Backend::Gloo,
    }
}

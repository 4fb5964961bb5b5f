//! `trainyard run` with a rendezvous: runs the elastic agent of this node.

use std::fs;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::PathBuf;
use std::process::ExitCode;

use trainyard_elastic::{AgentConfig, AgentError, AgentExit, AgentOutcome, run_agent};
use trainyard_launcher::{Job, LaunchError};
use trainyard_rendezvous::{RendezvousError, RunOutcome};
use trainyard_tls::RunSecret;

use super::rdzv::ElasticArgs;
use super::replica_args::ReplicaArgs;
use crate::failure::Failure;

const SECRET_HINT: &str = "create one on one node with `(umask 077; od -An -tx1 -N32 /dev/urandom | tr -d ' \\n' > FILE)`, \
     copy it to the other nodes, and add --run-secret-file FILE";

/// Runs the agent of this node until the run ends or the agent leaves it.
pub fn run(
    mut job: Job,
    elastic: ElasticArgs,
    replicas: &ReplicaArgs,
    log_dir: Option<PathBuf>,
) -> Result<ExitCode, Failure> {
    let path = secret_path(&job, &elastic, replicas)?;
    let secret = if elastic.is_local {
        RunSecret::read_or_create(&path)
    } else {
        RunSecret::read(&path)
    };
    let secret = secret.map_err(|error| Failure::usage(error).hint(SECRET_HINT))?;
    // Must outlive the workers, which restore their state from it.
    let _replicas = replicas.start_elastic(&elastic.host, &secret, &path, &mut job)?;
    let config = AgentConfig {
        log_dir: log_dir.map(|dir| dir.join(&job.run_id)),
        store_port: job.master_port.unwrap_or(0),
        job,
        rendezvous: elastic.rendezvous,
        secret,
        policy: elastic.policy,
        node_name: elastic.node_name,
        node_rank: elastic.node_rank,
        host: elastic.host,
    };
    let outcome = run_agent(&config).map_err(agent_failure)?;
    if let Some(workers) = &outcome.workers {
        workers.forward_recorded_error();
    }
    result(&outcome)
}

/// The file with the run's secret: the one that the user named, or a private one if the whole run is on this node.
fn secret_path(
    job: &Job,
    elastic: &ElasticArgs,
    replicas: &ReplicaArgs,
) -> Result<PathBuf, Failure> {
    if let Some(path) = replicas.secret_file() {
        return Ok(path.to_owned());
    }
    if !elastic.is_local {
        let message = "a run on several nodes needs a secret that only its nodes know";
        return Err(Failure::usage(message).hint(SECRET_HINT));
    }
    let is_plain = |c: &char| c.is_ascii_alphanumeric() || "_-".contains(*c);
    let name: String = job.run_id.chars().filter(is_plain).take(100).collect();
    Ok(private_dir()?.join(format!("{name}.secret")))
}

/// A directory that only this user can access.
fn private_dir() -> Result<PathBuf, Failure> {
    let user = fs::metadata("/proc/self").map_or(0, |own| own.uid());
    let dir = match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(dir) => PathBuf::from(dir).join("trainyard"),
        None => std::env::temp_dir().join(format!("trainyard-{user}")),
    };
    let failure = |reason: String| {
        Failure::new(format!(
            "cannot keep the run's secret in {}: {reason}",
            dir.display()
        ))
        .hint("name a file for the secret with --run-secret-file FILE")
    };
    let made = fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&dir);
    made.map_err(|error| failure(error.to_string()))?;
    let found = fs::symlink_metadata(&dir).map_err(|error| failure(error.to_string()))?;
    if found.is_dir() && found.uid() == user && found.mode() & 0o077 == 0 {
        Ok(dir)
    } else {
        Err(failure("other users can access it".to_owned()))
    }
}

fn agent_failure(error: AgentError) -> Failure {
    let hint = match &error {
        AgentError::Launch(error) => return launch_failure(error),
        AgentError::Store { .. } => "choose another --local-addr, or another --master-port",
        AgentError::Rendezvous(RendezvousError::Unreachable { .. }) => {
            "check that the node of --rdzv-endpoint, `trainyard rendezvous` or etcd is up, and that --rdzv-id and the \
             secret are the same on all nodes; --rdzv-conf join_timeout=SECONDS waits longer"
        }
        _ => return Failure::new(error),
    };
    Failure::new(&error).hint(hint)
}

/// The failure of a launcher that cannot start workers.
pub fn launch_failure(error: &LaunchError) -> Failure {
    let hint = match error {
        LaunchError::ProgramNotFound { .. } => "write `-- PROGRAM ARGS` after the options",
        LaunchError::Log { .. } => "choose another --log-dir",
        LaunchError::Port { .. } => "choose another --master-addr, or set --master-port",
        _ => return Failure::new(error),
    };
    Failure::new(error).hint(hint)
}

/// The result of the command: the outcome of the run is the same on all nodes, the exit code is that of this node.
fn result(outcome: &AgentOutcome) -> Result<ExitCode, Failure> {
    match &outcome.exit {
        AgentExit::RunEnded(RunOutcome::Succeeded) => Ok(ExitCode::SUCCESS),
        AgentExit::RunEnded(run @ RunOutcome::Failed { .. }) => {
            let code = outcome.workers.as_ref().map(|workers| workers.exit_code());
            let code = code.filter(|code| *code != 0).unwrap_or(1);
            Err(Failure::new(format!("the run failed: {run}")).with_code(code))
        }
        AgentExit::RunEnded(run @ RunOutcome::TimedOut { .. }) => {
            Err(Failure::new(format!("the run timed out: {run}"))
                .hint("start more nodes, or wait longer with --rdzv-conf join_timeout=SECONDS"))
        }
        AgentExit::Interrupted(signal) => {
            let code = u8::try_from(128 + signal.as_raw()).unwrap_or(u8::MAX);
            let message = format!("interrupted by signal {}", signal.as_raw());
            Err(Failure::new(message).with_code(code))
        }
        AgentExit::Disconnected(error) => Err(Failure::new(error)),
    }
}

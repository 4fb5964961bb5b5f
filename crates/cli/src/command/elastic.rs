//! `trainyard run` where machines come and go: this machine's agent, from the options to its last word.

use std::fs;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::PathBuf;
use std::process::ExitCode;

use trainyard_agent::{AgentError, Attendance, Ending, Part, attend};
use trainyard_elastic::{Job, LaunchError};
use trainyard_rendezvous::{Close, RendezvousError, Secret};

use super::holding::Holding;
use super::rdzv::Meeting;
use crate::failure::Failure;

const MAKE_A_SECRET: &str = "on one machine: (umask 077; od -An -tx1 -N32 /dev/urandom | tr -d ' \\n' > FILE); \
     copy it to the others, and add --run-secret-file FILE";

/// Takes part in an elastic run to its end.
pub fn run(
    mut job: Job,
    meeting: Meeting,
    holding: &Holding,
    log_dir: Option<PathBuf>,
) -> Result<ExitCode, Failure> {
    let path = secret_path(&job, &meeting, holding)?;
    let secret = match meeting.is_local {
        true => Secret::read_or_create(&path),
        false => Secret::read(&path),
    };
    let secret = secret.map_err(|error| Failure::usage(error).hint(MAKE_A_SECRET))?;
    // Outlives the workers: that is what it is for.
    let _held = holding.start_elastic(&meeting.host, &path, &mut job)?;
    let part = Part {
        log_dir: log_dir.map(|folder| folder.join(&job.run_id)),
        store_port: job.master_port.unwrap_or(0),
        job,
        way: meeting.way,
        secret,
        policy: meeting.policy,
        node: meeting.node,
        node_rank: meeting.node_rank,
        host: meeting.host,
    };
    let attendance = attend(&part).map_err(refusal)?;
    verdict(&attendance)
}

/// The run's secret: the file that was named, or one of this user's own if nobody else's machine is in it.
fn secret_path(job: &Job, meeting: &Meeting, holding: &Holding) -> Result<PathBuf, Failure> {
    if let Some(path) = holding.secret_file() {
        return Ok(path.to_owned());
    }
    if !meeting.is_local {
        let message = "beyond one machine, a run needs a secret that only its machines know";
        return Err(Failure::usage(message).hint(MAKE_A_SECRET));
    }
    let is_plain = |c: &char| c.is_ascii_alphanumeric() || "_-".contains(*c);
    let name: String = job.run_id.chars().filter(is_plain).take(100).collect();
    Ok(own_folder()?.join(format!("{name}.secret")))
}

/// A folder that only this user can look into.
fn own_folder() -> Result<PathBuf, Failure> {
    let user = fs::metadata("/proc/self").map_or(0, |own| own.uid());
    let folder = match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(folder) => PathBuf::from(folder).join("trainyard"),
        None => std::env::temp_dir().join(format!("trainyard-{user}")),
    };
    let refuse = |what: String| {
        Failure::new(format!("{}: {what}", folder.display()))
            .hint("name a file for the run's secret with --run-secret-file")
    };
    let made = fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&folder);
    made.map_err(|error| refuse(error.to_string()))?;
    let found = fs::symlink_metadata(&folder).map_err(|error| refuse(error.to_string()))?;
    match found.is_dir() && found.uid() == user && found.mode() & 0o077 == 0 {
        true => Ok(folder),
        false => Err(refuse("it is not this user's alone".to_owned())),
    }
}

fn refusal(error: AgentError) -> Failure {
    let hint = match &error {
        AgentError::Launch(error) => return launch_refusal(error),
        AgentError::Store { .. } => "choose another --local-addr, or another --master-port",
        AgentError::Rendezvous(RendezvousError::Unreachable { .. }) => {
            "is the first machine, or `trainyard rendezvous`, or etcd there? --rdzv-conf join_timeout=SECONDS \
             waits longer; --rdzv-id and the secret must be the same everywhere"
        }
        _ => return Failure::new(error),
    };
    Failure::new(&error).hint(hint)
}

/// Why workers could not be started at all.
pub fn launch_refusal(error: &LaunchError) -> Failure {
    let hint = match error {
        LaunchError::ProgramNotFound { .. } => "write `-- PROGRAM ARGS` after the options",
        LaunchError::Log { .. } => "choose another --log-dir",
        LaunchError::Port { .. } => "choose another --master-addr, or name a --master-port",
        _ => return Failure::new(error),
    };
    Failure::new(error).hint(hint)
}

/// The last word: how the run ended, for everybody the same, and with this machine's own code.
fn verdict(attendance: &Attendance) -> Result<ExitCode, Failure> {
    let own = attendance.outcome.as_ref();
    match &attendance.ending {
        Ending::Closed(Close::Succeeded) => Ok(ExitCode::SUCCESS),
        Ending::Closed(how @ Close::Failed { .. }) => {
            let own = own.map(|outcome| outcome.exit_code());
            let code = own.filter(|code| *code != 0).unwrap_or(1);
            Err(Failure::new(format!("the run is over: {how}")).with_code(code))
        }
        Ending::Closed(how @ Close::TimedOut { .. }) => {
            Err(Failure::new(format!("the run is over: {how}"))
                .hint("start more machines, or wait longer with --rdzv-conf join_timeout=SECONDS"))
        }
        Ending::Interrupted(signal) => {
            let code = u8::try_from(128 + signal.as_raw()).unwrap_or(u8::MAX);
            let message = format!("interrupted by signal {}", signal.as_raw());
            Err(Failure::new(message).with_code(code))
        }
        Ending::Cut(error) => Err(Failure::new(error)),
    }
}

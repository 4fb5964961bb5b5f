//! Kills every process that the workers of a launch have started, wherever it has gone.
//!
//! A process that calls `setsid` leaves the process group of its worker, and one whose parent has exited is no
//! descendant to the kernel any more. But all of them inherit the environment, so every launch puts an id of its own
//! into it. A process that clears its environment escapes.

use std::fs;
use std::io;

use rustix::process::{Pid, Signal, kill_process};

/// The variable with the id.
pub(crate) const LAUNCH_ID: &str = "TRAINYARD_LAUNCH_ID";

/// How often to look again: a process may start another one while it is being killed.
const MAX_ROUNDS: usize = 10;

/// An id that no other launch on this node has.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct LaunchId(String);

impl LaunchId {
    pub(crate) fn random() -> io::Result<LaunchId> {
        let id = getrandom::u64().map_err(io::Error::other)?;
        Ok(LaunchId(format!("{id:016x}")))
    }

    /// An id that another process has printed; `None` if it is not one.
    pub(crate) fn parse(text: &str) -> Option<LaunchId> {
        let is_id = text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        is_id.then(|| LaunchId(text.to_owned()))
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

/// Kills all processes of a launch that are left.
pub(crate) fn kill(id: &LaunchId) {
    for _ in 0..MAX_ROUNDS {
        let left = processes(id);
        if left.is_empty() {
            return;
        }
        for pid in left {
            // It may have exited meanwhile.
            let _ = kill_process(pid, Signal::KILL);
        }
    }
}

/// The running processes of a launch. The environment of an exited one is empty.
fn processes(id: &LaunchId) -> Vec<Pid> {
    let wanted = format!("{LAUNCH_ID}={}", id.0).into_bytes();
    let is_marked = |pid: &i32| {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let mut variables = environment.split(|byte| *byte == 0);
        variables.any(|variable| variable == wanted)
    };
    let entries = fs::read_dir("/proc").into_iter().flatten();
    let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    pids.filter(is_marked).filter_map(Pid::from_raw).collect()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_process_with_a_session_of_its_own_is_killed() {
        let id = LaunchId::random().unwrap();
        let mut child = Command::new("sh")
            .args(["-c", "setsid sleep 1000 & exec sleep 1000"])
            .env(LAUNCH_ID, id.as_str())
            .spawn()
            .unwrap();
        while processes(&id).len() < 2 {
            std::thread::yield_now();
        }
        kill(&id);
        child.wait().unwrap();
        // The other process is not our child. It exits when it is scheduled once more.
        while !processes(&id).is_empty() {
            std::thread::yield_now();
        }
    }

    #[test]
    fn only_ids_are_parsed() {
        let id = LaunchId::random().unwrap();
        assert_eq!(LaunchId::parse(id.as_str()), Some(id));
        assert_eq!(LaunchId::parse("12"), None);
        assert_eq!(LaunchId::parse("0123456789abcdeg"), None);
    }
}

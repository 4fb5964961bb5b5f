//! The keeper: one small process per job that outlives a killed launcher, to end what the workers
//! themselves have started.
//!
//! The kernel kills the workers when the launcher dies, but not their children: a script's Python,
//! a loader's processes. The keeper reads the pids of the process groups from a pipe. The word
//! `done` means that the launcher has cleared up itself; the end of the pipe without it means that
//! the launcher is dead, and every group is killed.

use std::io::{self, BufRead, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process_group};

use crate::worker;

/// The argument of the hidden subcommand that means the keeper.
pub(crate) const FLAG: &str = "--keep";

const DONE: &str = "done";

/// The launcher's end of the keeper.
#[derive(Debug)]
pub(crate) struct Keeper(Child);

impl Keeper {
    /// Starts a keeper, out of reach of the terminal's signals.
    pub(crate) fn start(trampoline: &Path) -> io::Result<Keeper> {
        Command::new(trampoline)
            .args([worker::SUBCOMMAND, FLAG])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .env(worker::MARK, "1")
            .process_group(0)
            .spawn()
            .map(Keeper)
    }

    /// Adds a process group to those it must not leave behind.
    pub(crate) fn hold(&mut self, group: Pid) {
        self.tell(&group.as_raw_pid().to_string());
    }

    /// Tells it that nothing is left to end, and sees it off.
    pub(crate) fn dismiss(mut self) {
        self.tell(DONE);
        // Closes the pipe first, so this cannot wait for ever.
        let _ = self.0.wait();
    }

    /// A keeper that somebody killed cannot be told anything, and the job is no worse for it.
    fn tell(&mut self, line: &str) {
        if let Some(pipe) = &mut self.0.stdin {
            let _ = pipe.write_all(format!("{line}\n").as_bytes());
        }
    }
}

/// The keeper's own life: reads until dismissed or orphaned.
pub(crate) fn keep(pipe: impl BufRead) {
    for group in orphans(pipe) {
        let _ = kill_process_group(group, Signal::KILL);
    }
}

/// The groups that a launcher left without having said that it was done.
fn orphans(pipe: impl BufRead) -> Vec<Pid> {
    let mut groups = Vec::new();
    for line in pipe.lines().map_while(Result::ok) {
        if line == DONE {
            return Vec::new();
        }
        // 0 and 1 would mean other groups than a worker's.
        groups.extend(
            line.parse()
                .ok()
                .filter(|pid| *pid > 1)
                .and_then(Pid::from_raw),
        );
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_launcher_that_died_leaves_orphans() {
        let groups = [Pid::from_raw(12).unwrap(), Pid::from_raw(34).unwrap()];
        assert_eq!(orphans(&b"12\n34\n"[..]), groups);
        assert_eq!(orphans(&b"12\n34\ndone\n"[..]), []);
        assert_eq!(orphans(&b""[..]), []);
    }

    #[test]
    fn nothing_but_a_group_is_ever_killed() {
        assert_eq!(orphans(&b"0\n1\n-5\nx\n\n"[..]), []);
    }
}

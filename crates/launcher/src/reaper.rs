//! The reaper: one small process per job that outlives a killed launcher and kills the processes that workers have
//! started.
//!
//! The kernel kills the workers when the launcher dies, but not their children: the Python of a shell script, the
//! processes of a data loader. The reaper reads the ids of the workers' process groups from a pipe. The line `done`
//! means that the launcher has killed all groups itself. If the pipe ends without it, the launcher is dead, and the
//! reaper kills every group.

use std::io::{self, BufRead, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process_group};

use crate::worker;

/// The argument of the hidden subcommand that starts the reaper.
pub(crate) const FLAG: &str = "--reaper";

const DONE: &str = "done";

/// The launcher's handle of its reaper.
#[derive(Debug)]
pub(crate) struct Reaper(Child);

impl Reaper {
    /// Starts a reaper in its own process group, so that signals of the terminal do not reach it.
    pub(crate) fn start(trampoline: &Path) -> io::Result<Reaper> {
        Command::new(trampoline)
            .args([worker::SUBCOMMAND, FLAG])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .env(worker::MARK, "1")
            .process_group(0)
            .spawn()
            .map(Reaper)
    }

    /// Adds a process group to those that the reaper kills if the launcher dies.
    pub(crate) fn register(&mut self, group: Pid) {
        self.send(&group.as_raw_pid().to_string());
    }

    /// Ends the reaper without killing anything.
    pub(crate) fn shutdown(mut self) {
        self.send(DONE);
        // `wait` closes the pipe first, so it cannot block forever.
        let _ = self.0.wait();
    }

    /// Errors are ignored: a job runs as well without its reaper.
    fn send(&mut self, line: &str) {
        if let Some(pipe) = &mut self.0.stdin {
            let _ = pipe.write_all(format!("{line}\n").as_bytes());
        }
    }
}

/// The main function of the reaper process: reads until the launcher is done or dead.
pub(crate) fn run(pipe: impl BufRead) {
    for group in orphans(pipe) {
        let _ = kill_process_group(group, Signal::KILL);
    }
}

/// The process groups of a launcher that died without sending `done`.
fn orphans(pipe: impl BufRead) -> Vec<Pid> {
    let mut groups = Vec::new();
    for line in pipe.lines().map_while(Result::ok) {
        if line == DONE {
            return Vec::new();
        }
        // For kill(2), 0 and 1 do not mean the group of a worker.
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
    fn only_valid_process_groups_are_killed() {
        assert_eq!(orphans(&b"0\n1\n-5\nx\n\n"[..]), []);
    }
}

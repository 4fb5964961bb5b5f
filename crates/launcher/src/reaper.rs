//! The reaper: one small process per job that outlives a killed launcher and kills the processes that workers have
//! started.
//!
//! The kernel kills the workers when the launcher dies, but not their children: the Python of a shell script, the
//! processes of a data loader. The reaper reads the id of the launch and the ids of the workers' process groups from a
//! pipe. The line `done` means that the launcher has killed them all itself. If the pipe ends without it, the launcher
//! is dead, and the reaper kills every group, and whatever else the launch has left.

use std::io::{self, BufRead, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process_group};

use crate::descendants::{self, LaunchId};
use crate::worker;

/// The argument of the hidden subcommand that starts the reaper.
pub(crate) const FLAG: &str = "--reaper";

const DONE: &str = "done";

/// The launcher's handle of its reaper.
#[derive(Debug)]
pub(crate) struct Reaper(Child);

impl Reaper {
    /// Starts a reaper in its own process group, so that signals of the terminal do not reach it.
    pub(crate) fn start(trampoline: &Path, launch: &LaunchId) -> io::Result<Reaper> {
        let child = Command::new(trampoline)
            .args([worker::SUBCOMMAND, FLAG])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .env(worker::MARK, "1")
            .process_group(0)
            .spawn()?;
        let mut reaper = Reaper(child);
        reaper.send(launch.as_str());
        Ok(reaper)
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
    let Some((launch, groups)) = orphans(pipe) else {
        return;
    };
    for group in groups {
        let _ = kill_process_group(group, Signal::KILL);
    }
    if let Some(launch) = launch {
        descendants::kill(&launch);
    }
}

/// The launch and the process groups of a launcher that died without sending `done`.
fn orphans(pipe: impl BufRead) -> Option<(Option<LaunchId>, Vec<Pid>)> {
    let mut lines = pipe.lines().map_while(Result::ok);
    let launch = lines.next().and_then(|line| LaunchId::parse(&line));
    let mut groups = Vec::new();
    for line in lines {
        if line == DONE {
            return None;
        }
        // For kill(2), 0 and 1 do not mean the group of a worker.
        groups.extend(
            line.parse()
                .ok()
                .filter(|pid| *pid > 1)
                .and_then(Pid::from_raw),
        );
    }
    Some((launch, groups))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_launcher_that_died_leaves_orphans() {
        let groups = vec![Pid::from_raw(12).unwrap(), Pid::from_raw(34).unwrap()];
        let launch = LaunchId::parse("0123456789abcdef");
        assert_eq!(
            orphans(&b"0123456789abcdef\n12\n34\n"[..]),
            Some((launch, groups))
        );
        assert_eq!(orphans(&b"0123456789abcdef\n12\n34\ndone\n"[..]), None);
        assert_eq!(orphans(&b""[..]), Some((None, vec![])));
    }

    #[test]
    fn only_valid_process_groups_are_killed() {
        let lines = &b"no id\n0\n1\n-5\nx\n\n"[..];
        assert_eq!(orphans(lines), Some((None, vec![])));
    }
}

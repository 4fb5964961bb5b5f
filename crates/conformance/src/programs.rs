//! The built programs, and their output.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};

use rustix::process::{Pid, Signal, kill_process};
use serde::de::DeserializeOwned;

/// The path of a built program, in the parent of the directory of the running test.
pub fn find(name: &str) -> Result<PathBuf, String> {
    let test = std::env::current_exe().map_err(|e| e.to_string())?;
    let folder = test.parent().and_then(Path::parent);
    let program = folder.map(|folder| folder.join(name)).unwrap_or_default();
    if program.is_file() {
        Ok(program)
    } else {
        Err(format!(
            "{} is not built: run cargo build --release --workspace first",
            program.display()
        ))
    }
}

/// The path of a file of the repository.
pub fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(path)
}

/// The Python with PyTorch that `./setup` installed, or the reason why it cannot be used.
pub fn python() -> Result<PathBuf, String> {
    let named = std::env::var_os("TRAINYARD_PYTHON").map(PathBuf::from);
    match named {
        Some(python) if python.is_file() => Ok(python),
        Some(python) => Err(format!(
            "TRAINYARD_PYTHON={} is not a file",
            python.display()
        )),
        None => Err("TRAINYARD_PYTHON is not set; run ./setup".to_owned()),
    }
}

/// Runs a command until it exits. A failure is an error with its output.
pub fn run(command: &mut Command) -> Result<Output, String> {
    let output = command
        .output()
        .map_err(|e| format!("cannot start {command:?}: {e}"))?;
    if output.status.success() {
        Ok(output)
    } else {
        Err(format!("{command:?}: {}", describe(&output)))
    }
}

/// The exit status and the output of a command.
pub fn describe(output: &Output) -> String {
    format!(
        "{}\n--- stdout\n{}--- stderr\n{}",
        output.status,
        text(&output.stdout),
        text(&output.stderr)
    )
}

/// Output as text.
pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The JSON in the output of a program: all of it, or its last JSON line, with or without a rank prefix.
pub fn json<T: DeserializeOwned>(output: &Output) -> Result<T, String> {
    let all = text(&output.stdout);
    let last = all.lines().rev().find_map(|line| {
        let start = line.find('{')?;
        serde_json::from_str(&line[start..]).ok()
    });
    serde_json::from_str(&all)
        .ok()
        .or(last)
        .ok_or_else(|| format!("no JSON in the output: {}", describe(output)))
}

/// Kills the processes of a rank that have the variable `mark` in their environment.
pub fn kill_rank(mark: &str, rank: usize) -> Result<(), Box<dyn Error>> {
    signal_rank(mark, rank, Signal::KILL)
}

/// Sends a signal to the processes of a rank that have the variable `mark` in their environment.
pub fn signal_rank(mark: &str, rank: usize, signal: Signal) -> Result<(), Box<dyn Error>> {
    let pids = processes(&[mark, &format!("RANK={rank}")]);
    if pids.is_empty() {
        return Err(format!("no process of rank {rank} is running").into());
    }
    for pid in pids {
        kill_process(Pid::from_raw(pid).ok_or("pid 0")?, signal)?;
    }
    Ok(())
}

/// The processes that have all these variables, as `NAME=value`, in their environment, without zombies.
pub fn processes(variables: &[&str]) -> Vec<i32> {
    let has_all = |pid: &i32| {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let found: Vec<&[u8]> = environment.split(|byte| *byte == 0).collect();
        variables
            .iter()
            .all(|wanted| found.contains(&wanted.as_bytes()))
    };
    let entries = std::fs::read_dir("/proc").into_iter().flatten();
    let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    pids.filter(has_all).collect()
}

/// A child process that is killed when the test ends.
pub struct Running(pub Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

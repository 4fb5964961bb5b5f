//! The built programs, and what they print.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};

use rustix::process::{Pid, Signal, kill_process};
use serde::de::DeserializeOwned;

/// Where a program was built: beside the folder of the running test.
pub fn find(name: &str) -> Result<PathBuf, String> {
    let test = std::env::current_exe().map_err(|e| e.to_string())?;
    let folder = test.parent().and_then(Path::parent);
    let program = folder.map(|folder| folder.join(name)).unwrap_or_default();
    match program.is_file() {
        true => Ok(program),
        false => Err(format!(
            "{} is not built: run cargo build --release --workspace first",
            program.display()
        )),
    }
}

/// A file of the repository.
pub fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(path)
}

/// The Python with PyTorch that `./setup` installed, or why there is none.
pub fn python() -> Result<PathBuf, String> {
    let named = std::env::var_os("TRAINYARD_PYTHON").map(PathBuf::from);
    match named {
        Some(python) if python.is_file() => Ok(python),
        Some(python) => Err(format!("TRAINYARD_PYTHON={} is no file", python.display())),
        None => Err("TRAINYARD_PYTHON is not set; ./setup does that".to_owned()),
    }
}

/// Runs a command to its end; an error when it fails.
pub fn run(command: &mut Command) -> Result<Output, String> {
    let output = command
        .output()
        .map_err(|e| format!("cannot start {command:?}: {e}"))?;
    match output.status.success() {
        true => Ok(output),
        false => Err(format!("{command:?}: {}", told(&output))),
    }
}

/// How a command ended and what it said.
pub fn told(output: &Output) -> String {
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

/// The JSON that a program printed: all of it, or the last line, with or without a rank before it.
pub fn json<T: DeserializeOwned>(output: &Output) -> Result<T, String> {
    let all = text(&output.stdout);
    let last = all.lines().rev().find_map(|line| {
        let start = line.find('{')?;
        serde_json::from_str(&line[start..]).ok()
    });
    serde_json::from_str(&all)
        .ok()
        .or(last)
        .ok_or_else(|| format!("no JSON in what it printed: {}", told(output)))
}

/// Kills the processes of a rank, among those with this variable in their environment.
pub fn kill_rank(mark: &str, rank: usize) -> Result<(), Box<dyn Error>> {
    signal_rank(mark, rank, Signal::KILL)
}

/// Sends the processes of a rank a signal, among those with this variable in their environment.
pub fn signal_rank(mark: &str, rank: usize, signal: Signal) -> Result<(), Box<dyn Error>> {
    let pids = processes(&[mark, &format!("RANK={rank}")]);
    if pids.is_empty() {
        return Err(format!("rank {rank} does not run").into());
    }
    for pid in pids {
        kill_process(Pid::from_raw(pid).ok_or("pid 0")?, signal)?;
    }
    Ok(())
}

/// The processes with these variables in their environment, as `NAME=value`, zombies aside.
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

/// Ends a job that a failed test would leave behind.
pub struct Running(pub Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

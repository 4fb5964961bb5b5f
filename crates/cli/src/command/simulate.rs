//! `trainyard simulate`: runs a program on simulated GPUs.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;

use crate::failure::Failure;

/// The environment variable with the directory of the simulated CUDA libraries.
const DIRECTORY: &str = "TRAINYARD_SIMULATED_CUDA";

/// Run a program on simulated GPUs
///
/// The program runs with libtorch's real CUDA build, caching allocator and NCCL process groups, on CUDA libraries whose
/// kernels compute nothing. That shows which kernels are launched and where, which memory is allocated, which
/// collectives are called and whether they match, and how long the host takes; it shows neither values nor the speed of
/// a GPU. `./setup --cuda` builds the libraries. Programs of PyTorch run too.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    trainyard simulate --gpus 2 -- trainyard run --standalone --nproc-per-node 2 -- \\\n    \
      trainyard train configs/llama-tiny.toml\n  \
    trainyard simulate --gpus 8 --arch 90 --report 'counts-%r.json' -- \\\n    \
      torchrun --standalone --nproc-per-node 8 train.py")]
pub struct Simulate {
    /// Number of GPUs
    #[arg(long, value_name = "N", default_value_t = 1)]
    gpus: usize,
    /// Compute capability of the GPUs: 80 (A100) or 90 (H100)
    #[arg(long, value_name = "SM", default_value = "80", value_parser = ["80", "90"])]
    arch: String,
    /// Memory of each GPU in GiB
    #[arg(long, value_name = "GIB", default_value_t = 80)]
    memory: u64,
    /// File for the counts of each process as JSON; %r stands for the rank, %p for the process
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// The program and its arguments
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "PROGRAM"
    )]
    program: Vec<OsString>,
}

impl Simulate {
    /// Replaces this process by the program; returns only on failure.
    pub fn execute(self) -> Failure {
        match self.command() {
            Ok(mut command) => {
                let error = command.exec();
                let program = self.program[0].display();
                Failure::new(format!("cannot start {program}: {error}"))
            }
            Err(failure) => failure,
        }
    }

    fn command(&self) -> Result<Command, Failure> {
        let mut command = Command::new(&self.program[0]);
        command
            .args(&self.program[1..])
            .envs(environment(&SimulatedGpus {
                gpus: self.gpus,
                arch: &self.arch,
                memory_bytes: self.memory << 30,
            })?);
        if let Some(report) = &self.report {
            command.env("TRAINYARD_SIM_REPORT", report);
        }
        Ok(command)
    }
}

/// The GPUs that a process sees.
pub struct SimulatedGpus<'a> {
    /// Number of GPUs.
    pub gpus: usize,
    /// Compute capability, such as "80".
    pub arch: &'a str,
    /// Memory of each GPU.
    pub memory_bytes: u64,
}

/// The environment of a process that runs on simulated GPUs.
pub fn environment(gpus: &SimulatedGpus<'_>) -> Result<Vec<(&'static str, OsString)>, Failure> {
    let libraries = libraries(&directory()?)?;
    Ok(vec![
        ("LD_PRELOAD", preload(&libraries)),
        ("TRAINYARD_SIM_GPUS", gpus.gpus.to_string().into()),
        ("TRAINYARD_SIM_ARCH", gpus.arch.into()),
        ("TRAINYARD_SIM_MEMORY", gpus.memory_bytes.to_string().into()),
    ])
}

/// The directory of the environment variable, or the one that `./setup --cuda` writes.
fn directory() -> Result<PathBuf, Failure> {
    if let Some(directory) = std::env::var_os(DIRECTORY) {
        return Ok(directory.into());
    }
    let variable = |name| std::env::var_os(name).map(PathBuf::from);
    let cache = variable("TRAINYARD_CACHE")
        .or_else(|| variable("XDG_CACHE_HOME").map(|cache| cache.join("trainyard")))
        .or_else(|| variable("HOME").map(|home| home.join(".cache/trainyard")));
    let cache = cache.ok_or_else(|| Failure::new("neither TRAINYARD_CACHE nor HOME is set"))?;
    Ok(cache.join("simulator/cuda"))
}

/// All libraries of the directory, in the order of their names.
fn libraries(directory: &Path) -> Result<Vec<PathBuf>, Failure> {
    let missing = |reason: String| {
        let directory = directory.display();
        Failure::new(format!(
            "no simulated CUDA libraries in {directory}: {reason}"
        ))
        .hint(format!(
            "build them with `./setup --cuda`, or set {DIRECTORY}"
        ))
    };
    let entries = std::fs::read_dir(directory).map_err(|error| missing(error.to_string()))?;
    let is_library = |path: &PathBuf| {
        let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
        name.starts_with("lib") && name.contains(".so")
    };
    let mut found: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(is_library)
        .collect();
    found.sort();
    if found.is_empty() {
        return Err(missing("it is empty".to_owned()));
    }
    Ok(found)
}

/// The value of `LD_PRELOAD`. libtorch's own search path would win over `LD_LIBRARY_PATH`.
fn preload(libraries: &[PathBuf]) -> OsString {
    let paths: Vec<&OsStr> = libraries.iter().map(|path| path.as_os_str()).collect();
    paths.join(OsStr::new(":"))
}

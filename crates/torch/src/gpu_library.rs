//! Loads the GPU library: libtorch's CUDA libraries and process groups of NCCL.
//!
//! One build of a program serves nodes with and without GPUs: the library is loaded at run time, where there is a GPU.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::bridge::ffi;

/// The name of the library, which the build puts beside the programs.
const NAME: &str = "libtrainyard_nccl.so";

/// The environment variable with the path of another GPU library, such as that of the simulated accelerator.
const VARIABLE: &str = "TRAINYARD_GPU_LIBRARY";

/// Loads the library once per process. Must come before anything asks libtorch for GPUs, because libtorch remembers
/// that there are none.
pub(crate) fn load() -> Result<(), String> {
    static LOADED: OnceLock<Result<(), String>> = OnceLock::new();
    LOADED
        .get_or_init(|| {
            let path = find()?;
            let text = path.to_string_lossy();
            ffi::load_gpu_library(&text).map_err(|error| format!("cannot load {text}: {error}"))
        })
        .clone()
}

/// Whether this node has a GPU, without loading anything: the driver's device file exists, or GPUs are simulated.
pub(crate) fn has_gpu() -> bool {
    Path::new("/dev/nvidiactl").exists()
        || std::env::var_os(VARIABLE).is_some()
        || std::env::var_os("TRAINYARD_SIM_GPUS").is_some()
}

/// The library of the environment variable, or the one beside this program or in the directory above, where cargo puts
/// it for tests and examples.
fn find() -> Result<PathBuf, String> {
    if let Some(path) = std::env::var_os(VARIABLE) {
        return Ok(path.into());
    }
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let directories = program.ancestors().skip(1).take(2);
    let mut paths = directories.map(|directory| directory.join(NAME));
    paths.find(|path| path.exists()).ok_or_else(|| {
        format!(
            "{NAME} is not beside {}: build it on a node where `./setup --cuda` has run, or set {VARIABLE}",
            program.display()
        )
    })
}

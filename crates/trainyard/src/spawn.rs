//! Ranks of a program that is started without a launcher.

use std::process::ExitCode;

use trainyard_launcher::{Console, Job, launch, worker};

use crate::{Error, Result};

/// Runs `rank` in `nprocs` processes of this program, and returns when all have ended, as PyTorch's
/// `torch.multiprocessing.spawn`. Each of them joins the others by [`init`](crate::init).
///
/// ```no_run
/// fn main() -> trainyard::Result<()> {
///     trainyard::spawn(2, || {
///         let world = trainyard::init()?;
///         println!("rank {} of {}", world.rank(), world.size());
///         Ok(())
///     })
/// }
/// ```
///
/// Call it first in `main`: every process starts the program again with the same arguments, and ends with `rank`. A program
/// that `trainyard run` or torchrun started has its ranks already: `rank` runs once, in this process.
pub fn spawn(nprocs: usize, rank: impl FnOnce() -> Result<()>) -> Result<()> {
    if let Some(code) = worker::intercept() {
        // A worker that could not start has printed why.
        std::process::exit(i32::from(code != ExitCode::SUCCESS));
    }
    if std::env::var_os("WORLD_SIZE").is_some() {
        end_with(rank());
    }
    let failed = |error: &dyn ToString| Error::Spawn(error.to_string());
    let program = std::env::current_exe().map_err(|error| failed(&error))?;
    let job = Job::new(program, nprocs)
        .args(std::env::args_os().skip(1))
        .console(Console::Plain);
    let outcome = launch(&job).map_err(|error| failed(&error))?;
    match outcome.report() {
        Some(report) if !outcome.is_success() => Err(Error::Spawn(report)),
        _ => Ok(()),
    }
}

/// Ends the process of a rank: what follows `spawn` in `main` is for the program that started it.
fn end_with(result: Result<()>) -> ! {
    if let Err(error) = &result {
        eprintln!("Error: {error}");
    }
    std::process::exit(i32::from(result.is_err()))
}

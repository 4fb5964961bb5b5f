//! `trainyard ckpt`: what is in a checkpoint, whether it is whole, how two differ, and others' formats.

mod convert;
mod diff;
mod inspect;
mod verify;

use std::path::Path;
use std::process::ExitCode;

use clap::{Args, Subcommand};
use trainyard_checkpoint::{Checkpoint, latest, store};

use crate::failure::Failure;

/// Inspect, verify, compare and convert checkpoints
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    trainyard ckpt inspect outputs/checkpoint\n  \
    trainyard ckpt verify outputs/checkpoint/step-500\n  \
    trainyard ckpt diff outputs/checkpoint/step-400 outputs/checkpoint/step-500\n  \
    trainyard ckpt verify s3://bucket/prefix/step-500\n\n\
    A checkpoint lies at a path, or in a bucket at s3://bucket/prefix; where the server is and who asks\n\
    is told by AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.")]
pub struct Ckpt {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Inspect(inspect::Inspect),
    Verify(verify::Verify),
    Diff(diff::Diff),
    Convert(convert::Convert),
}

impl Ckpt {
    /// Does it.
    pub fn execute(self) -> Result<ExitCode, Failure> {
        match self.command {
            Command::Inspect(inspect) => inspect.execute(),
            Command::Verify(verify) => verify.execute(),
            Command::Diff(diff) => diff.execute(),
            Command::Convert(convert) => convert.execute(),
        }
    }
}

/// The checkpoint at a path: a step's folder, or the newest in a folder of them.
fn open(path: &Path) -> Result<Checkpoint, Failure> {
    let store = store::open(path).map_err(Failure::new)?;
    let newest = latest(&*store).map_err(Failure::new)?;
    let folder = newest.unwrap_or_else(|| ".".to_owned());
    Checkpoint::open(store, &folder).map_err(|error| {
        Failure::new(error).hint("name the folder of a step, or the folder that has them")
    })
}

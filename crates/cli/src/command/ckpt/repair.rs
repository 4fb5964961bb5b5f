//! `trainyard ckpt repair`: finds damaged checkpoints in a folder and puts them aside.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use trainyard_checkpoint::{Condition, step_dir, store, survey};

use crate::failure::Failure;

/// The directory, in the folder of checkpoints, for those that cannot be used.
const QUARANTINE: &str = "quarantine";

/// List the checkpoints of a folder with their condition, and put damaged ones aside
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    trainyard ckpt repair outputs/checkpoint\n  \
    trainyard ckpt repair outputs/checkpoint --quarantine")]
pub struct Repair {
    /// The directory of a job's checkpoints, or s3://bucket/prefix
    path: PathBuf,
    /// Move checkpoints that are damaged or partial to the directory `quarantine` beside them
    #[arg(long)]
    quarantine: bool,
}

impl Repair {
    pub(super) fn execute(self) -> Result<ExitCode, Failure> {
        let store = store::open(&self.path).map_err(Failure::new)?;
        if self.quarantine && !self.path.is_dir() {
            let message = format!("{} is not a directory", self.path.display());
            return Err(Failure::usage(message).hint(
                "in an object store, move the listed prefixes with the tools of your provider",
            ));
        }
        let found = survey(&store, |step| eprintln!("reading {}", step_dir(step)));
        let found = found.map_err(Failure::new)?;
        if found.is_empty() {
            return Err(Failure::new(format!(
                "{} has no checkpoints",
                self.path.display()
            )));
        }
        let mut num_unusable = 0;
        for (step, condition) in &found {
            let text = match condition {
                Condition::Whole => "whole".to_owned(),
                Condition::Partial => "partial: left from an interrupted save".to_owned(),
                Condition::Damaged(reason) => format!("damaged: {reason}"),
            };
            println!("{:<16} {text}", step_dir(*step));
            if *condition != Condition::Whole {
                num_unusable += 1;
                if self.quarantine {
                    put_aside(&self.path, *step)?;
                }
            }
        }
        if num_unusable == 0 {
            return Ok(ExitCode::SUCCESS);
        }
        if self.quarantine {
            let target = self.path.join(QUARANTINE);
            println!("moved {num_unusable} to {}", target.display());
            return Ok(ExitCode::SUCCESS);
        }
        Err(
            Failure::new(format!("{num_unusable} of {} cannot be used", found.len()))
                .hint("a job skips them; --quarantine moves them aside"),
        )
    }
}

fn put_aside(folder: &Path, step: u64) -> Result<(), Failure> {
    let target = folder.join(QUARANTINE);
    let failed = |error| Failure::new(format!("{}: {error}", target.display()));
    fs::create_dir_all(&target).map_err(failed)?;
    let name = step_dir(step);
    fs::rename(folder.join(&name), target.join(&name)).map_err(failed)
}

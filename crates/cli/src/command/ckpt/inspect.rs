//! `trainyard ckpt inspect`: the content of a checkpoint.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use trainyard_checkpoint::{Checkpoint, TensorEntry};
use trainyard_trace::{counted, readable_bytes};

use crate::failure::Failure;

/// Show the content of a checkpoint
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  trainyard ckpt inspect outputs/checkpoint --tensors")]
pub struct Inspect {
    /// The directory of a checkpoint, or of several (the newest is used), or s3://bucket/prefix
    path: PathBuf,
    /// List every tensor
    #[arg(long)]
    tensors: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Inspect {
    pub(super) fn execute(self) -> Result<ExitCode, Failure> {
        let checkpoint = super::open(&self.path)?;
        if self.json {
            let json = serde_json::to_string(checkpoint.manifest()).map_err(Failure::new)?;
            println!("{json}");
            return Ok(ExitCode::SUCCESS);
        }
        summarize(&checkpoint);
        if self.tensors {
            println!();
            for (name, tensor) in &checkpoint.manifest().tensors {
                let (shape, parts) = (format!("{:?}", tensor.shape), tensor.chunks.len());
                println!("{:<5} {shape:<18} {parts:>3} parts  {name}", tensor.dtype);
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn summarize(checkpoint: &Checkpoint) {
    let manifest = checkpoint.manifest();
    println!("{}", checkpoint.path());
    if let Some(state) = checkpoint.state() {
        let samples = counted(state.samples_seen, "sample");
        let ranks = counted(state.world_size as u64, "rank");
        println!("step {}, {samples}, saved by {ranks}", state.step);
    }
    let elements = |tensor: &TensorEntry| tensor.shape.iter().product::<usize>() as u64;
    for (title, prefix) in [("model", "model/"), ("optimizer", "optimizer/")] {
        let tensors = manifest.tensors.iter();
        let own: Vec<_> = tensors
            .filter(|(name, _)| name.starts_with(prefix))
            .collect();
        let (numbers, bytes) = own.iter().fold((0, 0), |(n, b), (_, tensor)| {
            (n + elements(tensor), b + tensor.num_bytes().unwrap_or(0))
        });
        let size = readable_bytes(bytes);
        println!(
            "{title:<10} {:>6} tensors, {numbers} elements, {size}",
            own.len()
        );
    }
    let total: u64 = manifest.files.values().map(|file| file.num_bytes).sum();
    println!(
        "files      {:>6}, {}",
        manifest.files.len(),
        readable_bytes(total)
    );
}

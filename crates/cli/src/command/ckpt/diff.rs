//! `trainyard ckpt diff`: compares two checkpoints.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use serde::Serialize;
use trainyard_checkpoint::{Checkpoint, Dtype, TensorEntry};

use crate::failure::Failure;

/// Compare two checkpoints, tensor by tensor; exits with 1 if they differ
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  trainyard ckpt diff outputs/checkpoint/step-400 outputs/checkpoint/step-500"
)]
pub struct Diff {
    /// The first checkpoint: a path, or s3://bucket/prefix
    first: PathBuf,
    /// The second checkpoint
    second: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// A tensor that differs.
#[derive(Debug, Serialize)]
struct Difference {
    name: String,
    what: String,
}

impl Diff {
    pub(super) fn execute(self) -> Result<ExitCode, Failure> {
        let (first, second) = (super::open(&self.first)?, super::open(&self.second)?);
        let differences = compare(&first, &second)?;
        if self.json {
            println!("{}", serde_json::json!(differences))
        } else {
            print(&differences)
        }
        Ok(if differences.is_empty() {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        })
    }
}

fn print(differences: &[Difference]) {
    for difference in differences {
        println!("{}: {}", difference.name, difference.what);
    }
    match differences.len() {
        0 => println!("identical to the bit"),
        1 => println!("1 tensor differs"),
        n => println!("{n} tensors differ"),
    }
}

fn compare(first: &Checkpoint, second: &Checkpoint) -> Result<Vec<Difference>, Failure> {
    let tensors = |checkpoint: &Checkpoint| checkpoint.manifest().tensors.clone();
    let (ours, mut theirs) = (tensors(first), tensors(second));
    let mut differences = Vec::new();
    for (name, tensor) in ours {
        let what = match theirs.remove(&name) {
            None => Some("only in the first".to_owned()),
            Some(other) if (other.dtype, &other.shape) != (tensor.dtype, &tensor.shape) => {
                Some(format!("{} and {}", describe(&tensor), describe(&other)))
            }
            Some(_) => distance(first, second, &name, &tensor)?,
        };
        differences.extend(what.map(|what| Difference { name, what }));
    }
    let rest = theirs.into_keys();
    differences.extend(rest.map(|name| Difference {
        name,
        what: "only in the second".to_owned(),
    }));
    Ok(differences)
}

fn describe(tensor: &TensorEntry) -> String {
    format!("{} {:?}", tensor.dtype, tensor.shape)
}

/// How much the elements differ; `None` if they are equal.
fn distance(
    first: &Checkpoint,
    second: &Checkpoint,
    name: &str,
    tensor: &TensorEntry,
) -> Result<Option<String>, Failure> {
    let whole = |checkpoint: &Checkpoint| checkpoint.read_tensor(name).map_err(Failure::new);
    let (a, b) = (whole(first)?, whole(second)?);
    if a == b {
        return Ok(None);
    }
    let width = tensor.dtype.bitsize() / 8;
    let pairs = || a.chunks(width).zip(b.chunks(width));
    let num_different = pairs().filter(|(a, b)| a != b).count();
    let mut what = format!(
        "{num_different} of {} elements differ",
        a.len() / width.max(1)
    );
    let gaps =
        pairs().map(|(a, b)| Some((number(tensor.dtype, a)? - number(tensor.dtype, b)?).abs()));
    let largest = gaps.collect::<Option<Vec<f64>>>();
    if let Some(largest) = largest.map(|gaps| gaps.into_iter().fold(0.0, f64::max)) {
        what += &format!(", by up to {largest:e}");
    }
    Ok(Some(what))
}

/// An element as a float, for the types used in training.
fn number(dtype: Dtype, bytes: &[u8]) -> Option<f64> {
    Some(match dtype {
        Dtype::F64 => f64::from_le_bytes(bytes.try_into().ok()?),
        Dtype::F32 => f32::from_le_bytes(bytes.try_into().ok()?).into(),
        // The upper half of a float32.
        Dtype::BF16 => {
            f32::from_bits(u32::from(u16::from_le_bytes(bytes.try_into().ok()?)) << 16).into()
        }
        Dtype::I64 => i64::from_le_bytes(bytes.try_into().ok()?) as f64,
        _ => return None,
    })
}

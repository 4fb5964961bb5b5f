//! The two layouts of expert weights: Hugging Face files have one tensor per matrix and expert, models
//! (theirs and ours) have one stacked tensor for all experts of a layer.
//!
//! | in files (Mixtral) | in models |
//! |---|---|
//! | `mlp.experts.3.gate_proj.weight` (`w1`) | `mlp.experts.gate_up_proj`, first half of row 3 |
//! | `mlp.experts.3.up_proj.weight` (`w3`) | `mlp.experts.gate_up_proj`, second half of row 3 |
//! | `mlp.experts.3.down_proj.weight` (`w2`) | `mlp.experts.down_proj`, row 3 |
//!
//! Mixtral's names also have `block_sparse_moe` instead of `mlp`.
//!
//! Converting between them only changes which slice of which tensor a chunk holds; no elements are copied.

use std::collections::BTreeMap;

use trainyard_mesh::{Region, Slice};

use crate::manifest::{Manifest, TensorEntry};
use crate::{CheckpointError, Result};

const MIXTRAL: &str = ".block_sparse_moe.";
const USUAL: &str = ".mlp.";
/// The largest plausible number of experts in a layer.
const MAX_EXPERTS: usize = 1 << 16;

/// One of the weight matrices of an expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Matrix {
    Gate,
    Up,
    Down,
}

impl Matrix {
    const ALL: [Matrix; 3] = [Matrix::Gate, Matrix::Up, Matrix::Down];

    fn name(self, is_mixtral: bool) -> &'static str {
        match (self, is_mixtral) {
            (Matrix::Gate, false) => "gate_proj",
            (Matrix::Up, false) => "up_proj",
            (Matrix::Down, false) => "down_proj",
            (Matrix::Gate, true) => "w1",
            (Matrix::Up, true) => "w3",
            (Matrix::Down, true) => "w2",
        }
    }

    /// The name of the stacked tensor that holds this matrix.
    fn stacked_name(self) -> &'static str {
        match self {
            Matrix::Gate | Matrix::Up => "gate_up_proj",
            Matrix::Down => "down_proj",
        }
    }

    /// The number of matrices that the stacked tensor holds per expert.
    fn per_expert(self) -> usize {
        match self {
            Matrix::Gate | Matrix::Up => 2,
            Matrix::Down => 1,
        }
    }

    /// The slice of the stacked tensor that holds this matrix, whose own shape is `shape`.
    fn slice(self, expert: usize, shape: [usize; 2]) -> Slice {
        let [outputs, inputs] = shape;
        let offset = if self == Matrix::Up { outputs } else { 0 };
        Slice {
            region: Region {
                offsets: vec![expert, offset, 0],
                lengths: vec![1, outputs, inputs],
            },
            flat: None,
        }
    }
}

/// The name of a tensor in a model, for a name in a file of any model family.
pub(crate) fn model_layout_name(name: &str) -> String {
    name.replacen(MIXTRAL, USUAL, 1)
}

/// Splits the name of an expert's matrix in a file into layer, expert and matrix.
fn parse_name(name: &str) -> Option<(&str, usize, Matrix)> {
    let (layer, rest) = name.split_once(".experts.")?;
    let mut rest = rest.split('.');
    let (expert, matrix) = (rest.next()?.parse().ok()?, rest.next()?);
    if (rest.next(), rest.next()) != (Some("weight"), None) || expert >= MAX_EXPERTS {
        return None;
    }
    let has_name = |m: &Matrix| {
        [true, false]
            .iter()
            .any(|&mixtral| m.name(mixtral) == matrix)
    };
    Some((layer, expert, Matrix::ALL.into_iter().find(has_name)?))
}

/// Replaces the per-expert tensors of a manifest by stacked tensors. Errors name `path`.
pub(crate) fn stack_experts(manifest: &mut Manifest, path: &str) -> Result<()> {
    let mut by_stack: BTreeMap<String, Vec<(usize, Matrix, TensorEntry)>> = BTreeMap::new();
    for (name, tensor) in std::mem::take(&mut manifest.tensors) {
        match parse_name(&name) {
            Some((layer, expert, matrix)) => {
                let name = format!("{layer}.experts.{}", matrix.stacked_name());
                by_stack
                    .entry(name)
                    .or_default()
                    .push((expert, matrix, tensor));
            }
            None => {
                manifest.tensors.insert(name, tensor);
            }
        }
    }
    for (name, matrices) in by_stack {
        let reason = "its experts differ in type or shape";
        let stacked =
            stack(&matrices).ok_or_else(|| CheckpointError::tensor(path, &name, reason))?;
        manifest.tensors.insert(name, stacked);
    }
    manifest.check(path)
}

fn stack(matrices: &[(usize, Matrix, TensorEntry)]) -> Option<TensorEntry> {
    let (_, matrix, first) = matrices.first()?;
    let [outputs, inputs] = first.shape[..] else {
        return None;
    };
    let num_experts = matrices.iter().map(|(expert, _, _)| expert + 1).max()?;
    let mut chunks = Vec::with_capacity(matrices.len());
    for (expert, matrix, tensor) in matrices {
        // Hugging Face files hold unsharded tensors: one chunk each.
        let [chunk] = &tensor.chunks[..] else {
            return None;
        };
        if (&tensor.shape, tensor.dtype) != (&first.shape, first.dtype) {
            return None;
        }
        let mut chunk = chunk.clone();
        chunk.slice = matrix.slice(*expert, [outputs, inputs]);
        chunks.push(chunk);
    }
    Some(TensorEntry {
        dtype: first.dtype,
        shape: vec![
            num_experts,
            outputs.checked_mul(matrix.per_expert())?,
            inputs,
        ],
        chunks,
    })
}

/// The tensors of a Hugging Face file that hold one tensor of a model: the name, the shape, and the slice
/// of the model's tensor. All tensors but stacked experts map to a single one.
pub(crate) fn split_experts(
    name: &str,
    shape: &[usize],
    is_mixtral: bool,
) -> Vec<(String, Vec<usize>, Slice)> {
    let in_file = if is_mixtral {
        name.replacen(".mlp.gate.", ".block_sparse_moe.gate.", 1)
    } else {
        name.to_owned()
    };
    let found = name.split_once(".experts.");
    let (Some((layer, last)), &[num_experts, rows, inputs]) = (found, shape) else {
        return vec![(in_file, shape.to_vec(), Slice::full(shape))];
    };
    let layer = if is_mixtral {
        layer.replacen(".mlp", ".block_sparse_moe", 1)
    } else {
        layer.to_owned()
    };
    let mut matrices = Vec::new();
    for expert in 0..num_experts {
        let in_stack = |m: &Matrix| m.stacked_name() == last;
        for matrix in Matrix::ALL.into_iter().filter(in_stack) {
            let shape = [rows / matrix.per_expert(), inputs];
            let matrix_name = matrix.name(is_mixtral);
            matrices.push((
                format!("{layer}.experts.{expert}.{matrix_name}.weight"),
                shape.to_vec(),
                matrix.slice(expert, shape),
            ));
        }
    }
    matrices
}

#[cfg(test)]
mod tests {
    use safetensors::Dtype;

    use super::*;
    use crate::manifest::{Chunk, FileEntry};

    #[test]
    fn split_experts_stack_again() {
        for is_mixtral in [true, false] {
            let model = [
                ("model.layers.0.mlp.experts.gate_up_proj", vec![3, 8, 5]),
                ("model.layers.0.mlp.experts.down_proj", vec![3, 5, 4]),
                ("model.layers.0.mlp.gate.weight", vec![3, 5]),
                ("model.layers.0.mlp.gate_proj.weight", vec![7, 5]),
            ];
            let mut manifest = Manifest {
                state: None,
                tensors: BTreeMap::new(),
                files: BTreeMap::new(),
            };
            let mut end = 0;
            for (name, shape) in &model {
                for (name, shape, _) in split_experts(name, shape, is_mixtral) {
                    let chunk = Chunk {
                        file: "a".to_owned(),
                        byte_offset: end,
                        slice: Slice::full(&shape),
                    };
                    end += 4 * shape.iter().product::<usize>() as u64;
                    let tensor = TensorEntry {
                        dtype: Dtype::F32,
                        shape,
                        chunks: vec![chunk],
                    };
                    let name = model_layout_name(&name);
                    manifest.tensors.insert(name, tensor);
                }
            }
            let file = FileEntry {
                num_bytes: end,
                block_digests: None,
            };
            manifest.files.insert("a".to_owned(), file);
            assert_eq!(manifest.tensors.len(), 3 * 3 + 2);
            stack_experts(&mut manifest, "a").unwrap();
            for (name, shape) in &model {
                assert_eq!(&manifest.tensors[*name].shape, shape, "{name}");
            }
            let up = &manifest.tensors["model.layers.0.mlp.experts.gate_up_proj"].chunks;
            let halves = up.iter().filter(|p| p.slice.region.offsets == [2, 4, 0]);
            assert_eq!(halves.count(), 1);
            // A missing expert is detected.
            let name = "model.layers.0.mlp.experts.down_proj";
            manifest.tensors.get_mut(name).unwrap().chunks.pop();
            assert!(manifest.check("a").is_err());
        }
    }
}

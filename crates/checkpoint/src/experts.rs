//! Experts as Hugging Face's files have them, a tensor for each matrix of each, and as its models and
//! ours do: all experts of a layer in one.
//!
//! | in files | in models |
//! |---|---|
//! | `mlp.experts.3.gate_proj.weight`, Mixtral's `block_sparse_moe.experts.3.w1.weight` | `mlp.experts.gate_up_proj`, first half of row 3 |
//! | `mlp.experts.3.up_proj.weight`, `w3` | the second half |
//! | `mlp.experts.3.down_proj.weight`, `w2` | `mlp.experts.down_proj`, row 3 |
//!
//! Either is a way to say where parts of a tensor lie, so nothing is copied to go from one to the other.

use std::collections::BTreeMap;

use trainyard_mesh::{Region, Slice};

use crate::manifest::{Manifest, TensorEntry};
use crate::{CheckpointError, Result};

const MIXTRAL: &str = ".block_sparse_moe.";
const USUAL: &str = ".mlp.";
/// No honest layer has more experts.
const MAX_EXPERTS: usize = 1 << 16;

/// A matrix of an expert.
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

    fn in_models(self) -> &'static str {
        match self {
            Matrix::Gate | Matrix::Up => "gate_up_proj",
            Matrix::Down => "down_proj",
        }
    }

    /// Of how many matrices a row is made.
    fn per_row(self) -> usize {
        match self {
            Matrix::Gate | Matrix::Up => 2,
            Matrix::Down => 1,
        }
    }

    /// Its part of a tensor of all experts, given its own shape.
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

/// The name a tensor has in models, whatever family's file it is from.
pub(crate) fn in_models(name: &str) -> String {
    name.replacen(MIXTRAL, USUAL, 1)
}

/// Which matrix of which expert a name in a file is of, and what comes before.
fn parsed(name: &str) -> Option<(&str, usize, Matrix)> {
    let (layer, rest) = name.split_once(".experts.")?;
    let mut rest = rest.split('.');
    let (expert, matrix) = (rest.next()?.parse().ok()?, rest.next()?);
    if (rest.next(), rest.next()) != (Some("weight"), None) || expert >= MAX_EXPERTS {
        return None;
    }
    let is_it = |m: &Matrix| {
        [true, false]
            .iter()
            .any(|&mixtral| m.name(mixtral) == matrix)
    };
    Some((layer, expert, Matrix::ALL.into_iter().find(is_it)?))
}

/// Puts the matrices of a manifest's experts together. `path` is what errors name.
pub(crate) fn join(manifest: &mut Manifest, path: &str) -> Result<()> {
    let mut joined: BTreeMap<String, Vec<(usize, Matrix, TensorEntry)>> = BTreeMap::new();
    for (name, tensor) in std::mem::take(&mut manifest.tensors) {
        match parsed(&name) {
            Some((layer, expert, matrix)) => {
                let name = format!("{layer}.experts.{}", matrix.in_models());
                joined
                    .entry(name)
                    .or_default()
                    .push((expert, matrix, tensor));
            }
            None => {
                manifest.tensors.insert(name, tensor);
            }
        }
    }
    for (name, parts) in joined {
        let whole = put_together(&parts);
        let whole = whole
            .ok_or_else(|| CheckpointError::tensor(path, &name, "its experts are not all alike"))?;
        manifest.tensors.insert(name, whole);
    }
    manifest.check(path)
}

fn put_together(parts: &[(usize, Matrix, TensorEntry)]) -> Option<TensorEntry> {
    let (_, matrix, first) = parts.first()?;
    let [outputs, inputs] = first.shape[..] else {
        return None;
    };
    let num_experts = parts.iter().map(|(expert, _, _)| expert + 1).max()?;
    let mut pieces = Vec::with_capacity(parts.len());
    for (expert, matrix, tensor) in parts {
        // Whoever has no manifest has whole tensors, each in one piece.
        let [piece] = &tensor.pieces[..] else {
            return None;
        };
        if (&tensor.shape, tensor.dtype) != (&first.shape, first.dtype) {
            return None;
        }
        let mut piece = piece.clone();
        piece.slice = matrix.slice(*expert, [outputs, inputs]);
        pieces.push(piece);
    }
    Some(TensorEntry {
        dtype: first.dtype,
        shape: vec![num_experts, outputs.checked_mul(matrix.per_row())?, inputs],
        pieces,
    })
}

/// The tensors that a file has of one in a model: their names, shapes, and which part each is.
pub(crate) fn parted(
    name: &str,
    shape: &[usize],
    is_mixtral: bool,
) -> Vec<(String, Vec<usize>, Slice)> {
    let in_file = match is_mixtral {
        true => name.replacen(".mlp.gate.", ".block_sparse_moe.gate.", 1),
        false => name.to_owned(),
    };
    let found = name.split_once(".experts.");
    let (Some((layer, last)), &[num_experts, rows, inputs]) = (found, shape) else {
        return vec![(in_file, shape.to_vec(), Slice::whole(shape))];
    };
    let layer = match is_mixtral {
        true => layer.replacen(".mlp", ".block_sparse_moe", 1),
        false => layer.to_owned(),
    };
    let mut parts = Vec::new();
    for expert in 0..num_experts {
        for matrix in Matrix::ALL.into_iter().filter(|m| m.in_models() == last) {
            let shape = [rows / matrix.per_row(), inputs];
            let matrix_name = matrix.name(is_mixtral);
            parts.push((
                format!("{layer}.experts.{expert}.{matrix_name}.weight"),
                shape.to_vec(),
                matrix.slice(expert, shape),
            ));
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use safetensors::Dtype;

    use super::*;
    use crate::manifest::{FileEntry, Piece};

    #[test]
    fn what_is_parted_is_put_together_again() {
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
                for (name, shape, _) in parted(name, shape, is_mixtral) {
                    let piece = Piece {
                        file: "a".to_owned(),
                        start: end,
                        slice: Slice::whole(&shape),
                    };
                    end += 4 * shape.iter().product::<usize>() as u64;
                    let tensor = TensorEntry {
                        dtype: Dtype::F32,
                        shape,
                        pieces: vec![piece],
                    };
                    manifest.tensors.insert(in_models(&name), tensor);
                }
            }
            let file = FileEntry {
                num_bytes: end,
                blocks: None,
            };
            manifest.files.insert("a".to_owned(), file);
            assert_eq!(manifest.tensors.len(), 3 * 3 + 2);
            join(&mut manifest, "a").unwrap();
            for (name, shape) in &model {
                assert_eq!(&manifest.tensors[*name].shape, shape, "{name}");
            }
            let up = &manifest.tensors["model.layers.0.mlp.experts.gate_up_proj"].pieces;
            let halves = up.iter().filter(|p| p.slice.region.offsets == [2, 4, 0]);
            assert_eq!(halves.count(), 1);
            // An expert that is missing is missed.
            let name = "model.layers.0.mlp.experts.down_proj";
            manifest.tensors.get_mut(name).unwrap().pieces.pop();
            assert!(manifest.check("a").is_err());
        }
    }
}

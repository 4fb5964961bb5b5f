//! Fused projections in Hugging Face files: one matrix in the file, several in the model, one below the other.
//!
//! Rows lie one after the other in a file, so the parts of a fused matrix are ranges of its bytes: no elements are
//! copied.

use trainyard_arch::FusedProjection;
use trainyard_mesh::Slice;

use crate::manifest::{Chunk, Manifest, TensorEntry, bytes_of};
use crate::{CheckpointError, Result};

/// Replaces the fused matrices of a manifest by their parts. Errors name `path`.
pub(crate) fn split_projections(
    manifest: &mut Manifest,
    projections: &[FusedProjection],
    path: &str,
) -> Result<()> {
    for projection in projections {
        let is_fused = |name: &&String| name.ends_with(projection.name);
        let names: Vec<String> = manifest.tensors.keys().filter(is_fused).cloned().collect();
        for name in names {
            let Some(fused) = manifest.tensors.remove(&name) else {
                continue;
            };
            let reason = "config.json gives it another shape";
            let parts = split(&fused, projection)
                .ok_or_else(|| CheckpointError::tensor(path, &name, reason))?;
            let block = name.strip_suffix(projection.name).unwrap_or_default();
            let parts = projection.parts.iter().zip(parts);
            manifest
                .tensors
                .extend(parts.map(|((part, _), tensor)| (format!("{block}{part}"), tensor)));
        }
    }
    Ok(())
}

fn split(fused: &TensorEntry, projection: &FusedProjection) -> Option<Vec<TensorEntry>> {
    // Hugging Face files hold unsharded tensors: one chunk each.
    let ([chunk], &[rows, inputs]) = (&fused.chunks[..], &fused.shape[..]) else {
        return None;
    };
    if projection.parts.iter().map(|(_, rows)| rows).sum::<usize>() != rows {
        return None;
    }
    let mut start = chunk.byte_offset;
    let mut parts = Vec::with_capacity(projection.parts.len());
    for &(_, rows) in &projection.parts {
        let shape = vec![rows, inputs];
        let num_bytes = bytes_of(&shape, fused.dtype)?;
        parts.push(TensorEntry {
            dtype: fused.dtype,
            chunks: vec![Chunk {
                file: chunk.file.clone(),
                byte_offset: start,
                slice: Slice::full(&shape),
            }],
            shape,
        });
        start += num_bytes;
    }
    Some(parts)
}

/// The projection that contains the tensor `name`, and the names of its parts in that block.
pub(crate) fn fused_with(
    name: &str,
    projections: &[FusedProjection],
) -> Option<(String, Vec<String>)> {
    projections.iter().find_map(|projection| {
        let mut parts = projection.parts.iter();
        let block = parts.find_map(|(part, _)| name.strip_suffix(part))?;
        let parts = projection.parts.iter();
        Some((
            format!("{block}{}", projection.name),
            parts.map(|(part, _)| format!("{block}{part}")).collect(),
        ))
    })
}

//! A tensor's own bytes, to and from a file, without a copy between.
//!
//! These see memory, not values: autograd does not notice them. As with every in-place operation of
//! libtorch, nobody else may use the same memory meanwhile.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::slice;

use tch::{Device, Tensor};

use crate::storage;

/// Fills `tensor` from the file, beginning at `offset`. A file that ends too early is
/// [`io::ErrorKind::UnexpectedEof`]; the tensor's contents are then undefined.
pub fn read_at(file: &File, offset: u64, tensor: &Tensor) -> io::Result<()> {
    let memory = Memory::of(tensor)?;
    // SAFETY: see `Memory::of`; tch never hands out references into a tensor's memory, so none
    // lives beside this one, which ends with the call.
    let slice = unsafe { slice::from_raw_parts_mut(memory.start, memory.num_bytes) };
    file.read_exact_at(slice, offset)
}

/// Writes all of `tensor` into the file, beginning at `offset`.
pub fn write_at(file: &File, offset: u64, tensor: &Tensor) -> io::Result<()> {
    let memory = Memory::of(tensor)?;
    // SAFETY: see `Memory::of`; the reference ends with the call.
    let slice = unsafe { slice::from_raw_parts(memory.start, memory.num_bytes) };
    file.write_all_at(slice, offset)
}

/// Copies bytes of `tensor` from `start` on.
pub fn copy_out(tensor: &Tensor, start: usize, into: &mut [u8]) -> io::Result<()> {
    let memory = Memory::of(tensor)?;
    // SAFETY: see `Memory::of`; the reference ends with the call.
    let slice = unsafe { slice::from_raw_parts(memory.start, memory.num_bytes) };
    into.copy_from_slice(within(slice.len(), start, into.len()).map(|range| &slice[range])?);
    Ok(())
}

/// Makes bytes of `tensor` from `start` on those of `from`.
pub fn copy_in(tensor: &Tensor, start: usize, from: &[u8]) -> io::Result<()> {
    let memory = Memory::of(tensor)?;
    // SAFETY: as in `read_at`.
    let slice = unsafe { slice::from_raw_parts_mut(memory.start, memory.num_bytes) };
    let range = within(slice.len(), start, from.len())?;
    slice[range].copy_from_slice(from);
    Ok(())
}

/// `length` bytes from `start` on, if a tensor of `num_bytes` has them.
fn within(num_bytes: usize, start: usize, length: usize) -> io::Result<std::ops::Range<usize>> {
    let end = start.checked_add(length).filter(|&end| end <= num_bytes);
    let outside = || {
        refused(format!(
            "{length} bytes at {start} of a tensor of {num_bytes}"
        ))
    };
    end.map(|end| start..end).ok_or_else(outside)
}

/// The CRC-32C of a tensor's bytes.
pub fn checksum(tensor: &Tensor) -> io::Result<u32> {
    let memory = Memory::of(tensor)?;
    // SAFETY: see `Memory::of`; the reference ends with the call.
    let slice = unsafe { slice::from_raw_parts(memory.start, memory.num_bytes) };
    Ok(crc32c::crc32c(slice))
}

/// Sets every byte to zero on the calling thread alone; libtorch's `zero_` would start a team of
/// threads of its own for every thread that calls it.
pub fn zero(tensor: &Tensor) -> io::Result<()> {
    let memory = Memory::of(tensor)?;
    // SAFETY: as in `read_at`.
    let slice = unsafe { slice::from_raw_parts_mut(memory.start, memory.num_bytes) };
    slice.fill(0);
    Ok(())
}

/// Where a tensor's elements lie.
struct Memory {
    start: *mut u8,
    num_bytes: usize,
}

impl Memory {
    /// Proves that `num_bytes` at `start` are the tensor's, allocated, and on this machine: they stay
    /// so while the tensor is borrowed, unless its storage is released meanwhile. Any byte is a
    /// valid `u8`, and memory from libtorch's allocator counts as initialised to Rust.
    fn of(tensor: &Tensor) -> io::Result<Memory> {
        // First, because it is an error and not a panic for tensors that have no storage at all.
        let storage_bytes = storage::bytes(tensor).map_err(|e| refused(e.to_string()))?;
        let kind = tensor.f_kind().map_err(|e| refused(e.to_string()))?;
        if tensor.device() != Device::Cpu {
            return Err(refused("the tensor is not on the CPU".to_owned()));
        }
        if !tensor.is_contiguous() {
            let shape = tensor.size();
            return Err(refused(format!("the {shape:?} tensor is not contiguous")));
        }
        let num_bytes = tensor.numel() * kind.elt_size_in_bytes();
        if num_bytes == 0 {
            let start = std::ptr::NonNull::dangling().as_ptr();
            return Ok(Memory { start, num_bytes });
        }
        let before = tensor.storage_offset() as usize * kind.elt_size_in_bytes();
        let start = tensor.data_ptr().cast::<u8>();
        // A released storage keeps its size, and its null is hidden by the offset of a view.
        if start.addr() == before || before + num_bytes > storage_bytes {
            return Err(refused("the tensor's memory was released".to_owned()));
        }
        Ok(Memory { start, num_bytes })
    }
}

fn refused(reason: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, reason)
}

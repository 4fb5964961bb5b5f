//! Reads and writes the raw bytes of CPU tensors, to and from files, without an intermediate copy.
//!
//! These functions bypass autograd and do not change a tensor's version counter. As with every in-place operation of
//! libtorch, no other thread may use the same memory at the same time.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::slice;

use tch::{Device, Tensor};

use crate::storage;

/// Fills `tensor` from the file, starting at `offset`. If the file ends too early, the error is
/// [`io::ErrorKind::UnexpectedEof`] and the tensor's contents are undefined.
pub fn read_at(file: &File, offset: u64, tensor: &Tensor) -> io::Result<()> {
    let memory = Memory::of(tensor)?;
    // SAFETY: see `Memory::of`; tch never returns references into a tensor's memory, so this one, which ends with the
    // call, is the only one.
    let slice = unsafe { slice::from_raw_parts_mut(memory.start, memory.num_bytes) };
    file.read_exact_at(slice, offset)
}

/// Writes all of `tensor` to the file, starting at `offset`.
pub fn write_at(file: &File, offset: u64, tensor: &Tensor) -> io::Result<()> {
    let memory = Memory::of(tensor)?;
    // SAFETY: see `Memory::of`; the reference ends with the call.
    let slice = unsafe { slice::from_raw_parts(memory.start, memory.num_bytes) };
    file.write_all_at(slice, offset)
}

/// Copies the bytes of `tensor` from `start` on into `into`.
pub fn copy_out(tensor: &Tensor, start: usize, into: &mut [u8]) -> io::Result<()> {
    let memory = Memory::of(tensor)?;
    // SAFETY: see `Memory::of`; the reference ends with the call.
    let slice = unsafe { slice::from_raw_parts(memory.start, memory.num_bytes) };
    into.copy_from_slice(checked_range(slice.len(), start, into.len()).map(|range| &slice[range])?);
    Ok(())
}

/// Overwrites the bytes of `tensor` from `start` on with `from`.
pub fn copy_in(tensor: &Tensor, start: usize, from: &[u8]) -> io::Result<()> {
    let memory = Memory::of(tensor)?;
    // SAFETY: as in `read_at`.
    let slice = unsafe { slice::from_raw_parts_mut(memory.start, memory.num_bytes) };
    let range = checked_range(slice.len(), start, from.len())?;
    slice[range].copy_from_slice(from);
    Ok(())
}

/// Copies a range of the bytes of `from` over those of `into` from `start` on. The two must not share memory.
pub(crate) fn copy_between(
    from: &Tensor,
    range: std::ops::Range<usize>,
    into: &Tensor,
    start: usize,
) -> io::Result<()> {
    let memory = Memory::of(from)?;
    // SAFETY: see `Memory::of`; the reference ends with the call.
    let slice = unsafe { slice::from_raw_parts(memory.start, memory.num_bytes) };
    let range = checked_range(slice.len(), range.start, range.len())?;
    copy_in(into, start, &slice[range])
}

/// The range of `length` bytes from `start` on, if it lies within a tensor of `num_bytes`.
fn checked_range(
    num_bytes: usize,
    start: usize,
    length: usize,
) -> io::Result<std::ops::Range<usize>> {
    let end = start.checked_add(length).filter(|&end| end <= num_bytes);
    let outside = || {
        invalid_input(format!(
            "{length} bytes at offset {start} exceed a tensor of {num_bytes} bytes"
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

/// Sets every byte to zero on the calling thread. The operator `zero_` would start a thread pool for every thread
/// that calls it.
pub fn zero(tensor: &Tensor) -> io::Result<()> {
    let memory = Memory::of(tensor)?;
    // SAFETY: as in `read_at`.
    let slice = unsafe { slice::from_raw_parts_mut(memory.start, memory.num_bytes) };
    slice.fill(0);
    Ok(())
}

/// The memory of a contiguous CPU tensor.
struct Memory {
    start: *mut u8,
    num_bytes: usize,
}

impl Memory {
    /// Checks that `num_bytes` at `start` belong to the tensor, are allocated, and are host memory. That holds while
    /// the tensor is borrowed, unless its storage is released meanwhile. Any byte is a valid `u8`, and memory from
    /// libtorch's allocator counts as initialized to Rust.
    fn of(tensor: &Tensor) -> io::Result<Memory> {
        // First, because for a tensor without storage this returns an error where other accessors panic.
        let storage_bytes = storage::bytes(tensor).map_err(|e| invalid_input(e.to_string()))?;
        let kind = tensor.f_kind().map_err(|e| invalid_input(e.to_string()))?;
        if tensor.device() != Device::Cpu {
            return Err(invalid_input("the tensor is not on the CPU".to_owned()));
        }
        if !tensor.is_contiguous() {
            let shape = tensor.size();
            return Err(invalid_input(format!(
                "the {shape:?} tensor is not contiguous"
            )));
        }
        let num_bytes = tensor.numel() * kind.elt_size_in_bytes();
        if num_bytes == 0 {
            let start = std::ptr::NonNull::dangling().as_ptr();
            return Ok(Memory { start, num_bytes });
        }
        let before = tensor.storage_offset() as usize * kind.elt_size_in_bytes();
        let start = tensor.data_ptr().cast::<u8>();
        // A released storage keeps its size, and the data pointer of a view is null plus the view's offset.
        if start.addr() == before || before + num_bytes > storage_bytes {
            return Err(invalid_input("the tensor's memory was released".to_owned()));
        }
        Ok(Memory { start, num_bytes })
    }
}

fn invalid_input(reason: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, reason)
}

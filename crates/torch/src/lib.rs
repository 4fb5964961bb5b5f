//! The parts of libtorch that `tch` does not bind: process groups and stores, autograd hooks and custom functions,
//! storages, meta tensors, fused kernels, and observers of memory and operators.
//!
//! This crate contains all C++ and all `unsafe` code of the workspace. C++ exceptions and panics in callbacks become
//! errors: nothing unwinds across the FFI boundary in either direction.
//!
//! - [`World`] and [`Group`]: process groups along the axes of a device mesh, and their collectives. Every collective
//!   returns a [`Work`] and is recorded in the ledger.
//! - [`autograd`] and [`saved`]: gradient hooks, custom autograd functions in Rust, and saved-tensor hooks.
//! - [`interleave()`]: runs two passes so that one computes while the other waits for communication.
//! - [`storage`] and [`meta`]: releasing and restoring a tensor's memory, and tensors without memory.
//! - [`device`]: the current device, streams, events and pinned memory.
//! - [`bytes`]: reads and writes the raw bytes of a tensor.
//! - [`kernel`]: operators that `tch` does not bind.
//! - [`uncaught`]: messages for exceptions that nothing catches.
//! - [`memory`] and [`operators`]: records of allocations and of executed operators.
#![allow(unsafe_code)]

pub mod autograd;
mod bridge;
pub mod bytes;
mod comm_thread;
pub mod device;
mod device_clock;
mod direct_collectives;
mod error;
mod ffi_tensor;
mod gpu_library;
mod group;
mod interleave;
pub mod kernel;
pub mod memory;
pub mod meta;
pub mod operators;
mod peers;
pub mod saved;
pub mod scalar;
mod shared_memory;
mod sockets;
pub mod storage;
mod store;
pub mod uncaught;
mod work;
mod world;

pub use error::{Cause, CommunicationError, Result, TorchError};
pub use group::{Group, GroupInfo, P2pOp, ReduceOp};
pub use interleave::interleave;
pub use sockets::WireBytes;
pub use store::Store;
pub use tch::{Device, Kind, Tensor};
pub use work::Work;
pub use world::{Backend, Rendezvous, World, local_world_size, require_gpu};

/// The target of a position that has none, which cross entropy leaves out: PyTorch's default `ignore_index`.
pub const IGNORE_INDEX: i64 = -100;

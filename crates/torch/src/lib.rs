//! What `tch` lacks of libtorch: process groups and stores, hooks and functions of autograd,
//! storages, meta tensors, fused kernels, and observers of memory and operators.
//!
//! All C++ and all `unsafe` of the workspace is in this crate. Exceptions become errors and panics
//! of callbacks become errors: nothing unwinds across the border in either direction.
//!
//! - [`World`] and [`Group`]: who the ranks are, and how they communicate. Every collective returns
//!   a [`Work`] and is written in the ledger.
//! - [`autograd`] and [`saved`]: hooks on gradients, functions with a backward in Rust, and what
//!   becomes of saved tensors.
//! - [`beside`]: two passes, one of which computes while the other waits.
//! - [`storage`] and [`meta`]: memory released and taken again, and tensors that have none.
//! - [`bytes`]: a tensor's own bytes, to and from a file.
//! - [`kernel`]: operators `tch` does not bind.
//! - [`memory`] and [`operators`]: what was allocated, and what ran.
#![allow(unsafe_code)]

pub mod autograd;
mod border;
mod bridge;
pub mod bytes;
mod compose;
mod error;
mod group;
pub mod kernel;
mod lane;
pub mod memory;
pub mod meta;
pub mod operators;
pub mod saved;
mod sockets;
pub mod storage;
mod store;
mod turns;
mod work;
mod world;

pub use error::{Cause, CommunicationError, Result, TorchError};
pub use group::{Group, Message, Place, ReduceOp};
pub use sockets::WireBytes;
pub use store::Store;
pub use tch::{Device, Kind, Tensor};
pub use turns::beside;
pub use work::Work;
pub use world::{Backend, Rendezvous, World, ranks_on_this_machine, require_gpu};

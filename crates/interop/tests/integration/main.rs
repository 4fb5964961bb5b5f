//! The frameworks' own code parses what is written for them; their configs become Trainyard's key by key.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod frameworks;
mod translate_accelerate;
mod translate_deepspeed;
mod translate_megatron;
mod translate_torchtitan;

//! Integration tests of modules and models, compared with formulas and with PyTorch.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod adapter;
mod chunked_loss;
mod experts;
mod models;
mod presets;
mod unit_hooks;
mod weights;

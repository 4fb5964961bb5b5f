//! Meshes and layouts: algebraic properties and expected diagrams.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod algebra;
mod layouts;
mod tiling;

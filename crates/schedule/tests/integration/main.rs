//! Pipeline schedules: properties of the generated schedules and programs.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod closed_form;
mod programs;
mod properties;

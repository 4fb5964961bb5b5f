//! The abort marker: how a launcher lets its ranks know that their world is broken.

use std::fs;
use std::io;
use std::path::Path;

const MARKER: &str = "aborted";

/// Marks the world whose ranks write heartbeats into `dir` as aborted: a rank that gets SIGTERM has nothing to
/// finish, because its peers are gone.
pub fn mark_aborted(dir: &Path) -> io::Result<()> {
    fs::write(dir.join(MARKER), "")
}

/// Whether the launcher has aborted the world whose ranks write heartbeats into `dir`.
pub fn is_aborted(dir: &Path) -> bool {
    dir.join(MARKER).exists()
}

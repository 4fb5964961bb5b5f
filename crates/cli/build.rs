//! Tells the program the commit that it is built from, for `trainyard --version`.

use std::process::Command;

fn main() {
    println!("cargo:rerun-if-env-changed=TRAINYARD_COMMIT");
    // Git appends a line to this file when the commit changes.
    if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]) {
        println!("cargo:rerun-if-changed={log}");
    }
    let commit = std::env::var("TRAINYARD_COMMIT").ok();
    let commit = commit.or_else(|| git(&["rev-parse", "--short=9", "HEAD"]));
    let commit = commit.unwrap_or_else(|| "unknown commit".to_owned());
    println!("cargo:rustc-env=TRAINYARD_COMMIT={commit}");
}

/// What git prints; `None` if there is no git, or if the source is not a clone.
fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?.trim().to_owned();
    (output.status.success() && !text.is_empty()).then_some(text)
}

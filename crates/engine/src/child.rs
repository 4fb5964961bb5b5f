//! Commands that run in a process of their own: this program again, with other arguments.

use std::process::Command;

use crate::error::{EngineError, Result};

/// What this program prints for the arguments and environment that `configure` sets, or its error.
pub fn ask(
    configure: impl FnOnce(&mut Command) -> &mut Command,
) -> Result<Result<Vec<u8>, String>> {
    let io = |source| EngineError::Io {
        path: "trainyard-engine".into(),
        source,
    };
    let mut command = Command::new(std::env::current_exe().map_err(io)?);
    let output = configure(&mut command).output().map_err(io)?;
    let text = String::from_utf8_lossy(&output.stderr);
    match output.status.code() {
        Some(0) => Ok(Ok(output.stdout)),
        Some(_) => Ok(Err(reason(&text).to_owned())),
        None => Err(EngineError::Rank(format!(
            "{:?} was killed ({}): {}",
            command,
            output.status,
            text.trim()
        ))),
    }
}

/// The error that the program ended with, without what it logged before.
fn reason(text: &str) -> &str {
    let mark = "error: ";
    let start = text
        .rfind(&format!("\n{mark}"))
        .map(|newline| newline + 1 + mark.len())
        .or_else(|| text.starts_with(mark).then_some(mark.len()));
    text[start.unwrap_or(0)..].trim()
}

#[cfg(test)]
mod tests {
    use super::reason;

    #[test]
    fn the_reason_is_the_error_and_not_the_log() {
        assert_eq!(reason("error: too few\nuse 2\n"), "too few\nuse 2");
        assert_eq!(reason(" INFO error: x\nerror: too few\n"), "too few");
        assert_eq!(reason("Killed\n"), "Killed");
    }
}

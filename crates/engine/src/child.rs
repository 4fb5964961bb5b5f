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
    Ok(if output.status.success() {
        Ok(output.stdout)
    } else {
        let text = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        Err(text.strip_prefix("error: ").unwrap_or(&text).to_owned())
    })
}

//! Failures of commands: the reason, a hint, and the exit code.

use std::fmt;
use std::process::ExitCode;

/// The reason why a command failed.
#[derive(Debug)]
pub struct Failure {
    message: String,
    hint: Option<String>,
    code: u8,
}

impl Failure {
    /// A failure with exit code 1.
    pub fn new(message: impl fmt::Display) -> Failure {
        Failure {
            message: message.to_string(),
            hint: None,
            code: 1,
        }
    }

    /// Invalid arguments; exit code 2.
    pub fn usage(message: impl fmt::Display) -> Failure {
        Failure::new(message).with_code(2)
    }

    /// Adds a hint that says what to do.
    pub fn hint(mut self, hint: impl Into<String>) -> Failure {
        self.hint = Some(hint.into());
        self
    }

    /// Sets the exit code.
    pub fn with_code(mut self, code: u8) -> Failure {
        self.code = code;
        self
    }

    /// The exit code.
    pub fn code(&self) -> ExitCode {
        self.code.into()
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "error: {}", self.message)?;
        match &self.hint {
            Some(hint) => write!(f, "\nhint: {hint}"),
            None => Ok(()),
        }
    }
}

//! What a command says when it does not do what it was asked: the reason, and what to do.

use std::fmt;
use std::process::ExitCode;

/// Why a command failed.
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

    /// Arguments that are understood and refused; exit code 2.
    pub fn usage(message: impl fmt::Display) -> Failure {
        Failure::new(message).with_code(2)
    }

    /// Adds what to do about it.
    pub fn hint(mut self, hint: impl Into<String>) -> Failure {
        self.hint = Some(hint.into());
        self
    }

    /// Exits with another code.
    pub fn with_code(mut self, code: u8) -> Failure {
        self.code = code;
        self
    }

    /// The code to exit with.
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

//! Colors on terminals, by the conventions of `NO_COLOR` and `CLICOLOR_FORCE`, and by `--color`.

use std::ffi::OsString;
use std::io;

use anstream::{AutoStream, ColorChoice};

/// Whether text on stdout is colored.
pub fn on_stdout() -> bool {
    AutoStream::choice(&io::stdout()) != ColorChoice::Never
}

/// Whether text on stderr is colored.
pub fn on_stderr() -> bool {
    AutoStream::choice(&io::stderr()) != ColorChoice::Never
}

/// What makes other programs color their output as this one does, although they may write to a pipe.
pub fn environment() -> Option<(OsString, OsString)> {
    let name = match ColorChoice::global() {
        ColorChoice::Never => "NO_COLOR",
        _ if on_stdout() => "CLICOLOR_FORCE",
        _ => return None,
    };
    Some((name.into(), "1".into()))
}

//! What the front door itself has to tell while it works: on stderr, from a level on.

use std::io::{self, IsTerminal};

use tracing_subscriber::EnvFilter;

/// Tells from `level` on, or as `RUST_LOG` says.
pub fn to_stderr(level: &str) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level));
    let logging = tracing_subscriber::fmt()
        .with_writer(io::stderr)
        .with_target(false)
        .with_ansi(io::stderr().is_terminal())
        .with_env_filter(filter);
    // One that is there already tells just as well.
    let _ = logging.try_init();
}

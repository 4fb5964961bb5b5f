//! Logging of the command line to stderr.

use std::io;

use tracing_subscriber::EnvFilter;
use trainyard_launcher::color;

/// Logs from `level` on, or as `RUST_LOG` says.
pub fn to_stderr(level: &str) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level));
    let logging = tracing_subscriber::fmt()
        .with_writer(io::stderr)
        .with_target(false)
        .with_ansi(color::on_stderr())
        .with_env_filter(filter);
    // A subscriber that is already installed stays.
    let _ = logging.try_init();
}

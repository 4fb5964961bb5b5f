//! Why metrics cannot be made available.

use std::io;
use std::net::SocketAddr;

use thiserror::Error;

/// An error of telemetry at its start. Later failures are logged: a job does not end because of its metrics.
#[derive(Debug, Error)]
pub enum TelemetryError {
    /// The address is taken, or not one of this host.
    #[error("cannot serve metrics at {address}: {source}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The reason.
        source: io::Error,
    },
    /// A setting of the OpenTelemetry exporter has no meaning.
    #[error("{name}={value} is not valid: {reason}")]
    Otlp {
        /// The option or the environment variable.
        name: String,
        /// Its value.
        value: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The thread that serves and pushes cannot be started.
    #[error("cannot start the telemetry thread: {0}")]
    Thread(#[from] io::Error),
}

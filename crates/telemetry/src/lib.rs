//! Metrics of a running job, from the launcher, which outlives the job's ranks.
//!
//! The launcher reads the heartbeats of ranks several times a second. [`JobMetrics`] sums what they report over all
//! restarts; [`families`] describes it as metric families; [`Telemetry`] serves these to Prometheus as [`exposition`]
//! and pushes them to an OpenTelemetry collector, and serves a page that shows the job in a browser. Ranks never
//! wait for any of it.

mod error;
mod exposition;
mod families;
mod family;
mod goodput;
mod job_metrics;
#[cfg(feature = "otlp")]
mod otlp;
#[cfg(not(feature = "otlp"))]
#[path = "no_otlp.rs"]
mod otlp;
mod page;
mod restart_cause;
mod server;
mod telemetry;

pub use error::TelemetryError;
pub use exposition::{Format, exposition};
pub use families::{Build, families};
pub use family::{Family, Kind, Sample, Value};
pub use goodput::{Goodput, Position};
pub use job_metrics::JobMetrics;
pub use otlp::OtlpConfig;
pub use page::Prediction;
pub use restart_cause::RestartCause;
pub use telemetry::{Telemetry, TelemetryConfig};

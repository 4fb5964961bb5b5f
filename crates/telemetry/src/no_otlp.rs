//! A build without OpenTelemetry: there is no configuration of a push.

use tokio::sync::watch;

use crate::telemetry::Source;

/// A collector, and how metrics are pushed to it. No value exists: this program was built without the feature `otlp`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum OtlpConfig {}

pub(crate) async fn push_until(
    _stopped: watch::Receiver<()>,
    config: &OtlpConfig,
    _source: &Source,
) {
    match *config {}
}

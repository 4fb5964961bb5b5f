//! Pushes metrics to an OpenTelemetry collector: OTLP over HTTP, in its JSON encoding.

mod config;
mod request;

use std::time::{Instant, SystemTime};

use reqwest::{Client, StatusCode};
use tokio::sync::watch;

pub use config::OtlpConfig;

use crate::telemetry::Source;

/// Pushes at every interval and, when `stopped`, for the last time.
pub(crate) async fn push_until(
    mut stopped: watch::Receiver<()>,
    config: &OtlpConfig,
    source: &Source,
) {
    let Some(mut pusher) = Pusher::new(config) else {
        return;
    };
    loop {
        let is_stopped = tokio::select! {
            _ = stopped.changed() => true,
            () = tokio::time::sleep(config.interval) => false,
        };
        pusher.push(source).await;
        if is_stopped {
            return;
        }
    }
}

struct Pusher<'a> {
    config: &'a OtlpConfig,
    client: Client,
    began: SystemTime,
    /// Since when the collector does not take metrics.
    failing_since: Option<Instant>,
}

impl Pusher<'_> {
    fn new(config: &OtlpConfig) -> Option<Pusher<'_>> {
        // An error means that the program has chosen an implementation of cryptography already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = Client::builder().timeout(config.timeout).build();
        match client {
            Ok(client) => Some(Pusher {
                config,
                client,
                began: SystemTime::now(),
                failing_since: None,
            }),
            Err(error) => {
                tracing::warn!("metrics are not pushed: {error}");
                None
            }
        }
    }

    /// A failure is logged once: the next push sends counters that contain what this one had.
    async fn push(&mut self, source: &Source) {
        let url = &self.config.endpoint;
        match (self.send(source).await, self.failing_since) {
            (Ok(()), Some(since)) => {
                let seconds = since.elapsed().as_secs();
                tracing::info!("{url} takes metrics again, after {seconds} s");
                self.failing_since = None;
            }
            (Err(error), None) => {
                tracing::warn!("cannot push metrics to {url}, will try again: {error}");
                self.failing_since = Some(Instant::now());
            }
            (Ok(()), None) | (Err(_), Some(_)) => {}
        }
    }

    async fn send(&self, source: &Source) -> Result<(), String> {
        let now = SystemTime::now();
        let body = request::body(
            self.config,
            source.build(),
            &source.families(),
            self.began,
            now,
        );
        let mut request = self.client.post(&self.config.endpoint);
        for (name, value) in &self.config.headers {
            request = request.header(name, value);
        }
        let request = request.header("content-type", "application/json");
        let sent = request.body(body.to_string()).send().await;
        let response = sent.map_err(|error| with_causes(&error))?;
        match response.status() {
            StatusCode::OK => Ok(()),
            status => {
                let text = response.text().await.unwrap_or_default();
                let reason: String = text.chars().take(200).collect();
                Err(format!("{status} {reason}"))
            }
        }
    }
}

/// The message of an error and of its causes: reqwest's own says only that something failed.
fn with_causes(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    let texts: Vec<String> = causes.map(ToString::to_string).collect();
    texts.join(": ")
}

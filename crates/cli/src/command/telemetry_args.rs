//! The options of `trainyard run` for metrics and for the page of the job, and what they start.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use clap::Args;
use trainyard_launcher::Job;
use trainyard_telemetry::{
    Build, OtlpConfig, Prediction, Telemetry, TelemetryConfig, TelemetryError,
};

use crate::failure::Failure;

/// Where metrics of the job go, and where its page is served.
#[derive(Debug, Args)]
#[command(next_help_heading = "Metrics")]
pub struct TelemetryArgs {
    /// Serve the metrics of the job to Prometheus at http://ADDR:PORT/metrics; 0 chooses a free port
    #[arg(long, value_name = "PORT")]
    metrics_port: Option<u16>,
    /// The address to serve them at; only programs of this host reach the default
    #[arg(long, value_name = "ADDR", default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST), requires = "metrics_port")]
    metrics_addr: IpAddr,
    #[cfg(feature = "otlp")]
    /// Push the metrics of the job to this OpenTelemetry collector, such as http://localhost:4318; without a value, to
    /// that of the environment variables OTEL_EXPORTER_OTLP_*
    #[arg(long, value_name = "URL", num_args = 0..=1, require_equals = true, default_missing_value = "")]
    otlp_endpoint: Option<String>,
    /// Add series for each rank, whose number grows with the job
    #[arg(long)]
    metrics_per_rank: bool,
    /// Serve a page that shows the job, at the address that is printed; 0 chooses a free port
    #[arg(long, value_name = "PORT")]
    ui_port: Option<u16>,
    /// The address to serve the page at; over SSH, forward the port instead of changing it
    #[arg(long, value_name = "ADDR", default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST), requires = "ui_port")]
    ui_addr: IpAddr,
    /// The output of `trainyard plan --json`, which the page shows beside what is measured
    #[arg(long, value_name = "FILE", requires = "ui_port")]
    ui_plan: Option<PathBuf>,
}

impl TelemetryArgs {
    /// Starts what the options ask for, which observes the job from then on. It must live as long as the job.
    pub fn start(&self, job: &mut Job) -> Result<Option<Telemetry>, Failure> {
        let at = |address: IpAddr| move |port| SocketAddr::new(address, port);
        let metrics = self.metrics_port.map(at(self.metrics_addr));
        let page = self.ui_port.map(at(self.ui_addr));
        let otlp = self.otlp(&job.run_id)?;
        if metrics.is_none() && otlp.is_none() && page.is_none() {
            return Ok(None);
        }
        let telemetry = start(TelemetryConfig {
            run_id: job.run_id.clone(),
            is_attached: false,
            build: build(),
            per_rank: self.metrics_per_rank,
            metrics,
            otlp,
            page,
            prediction: prediction(self.ui_plan.as_deref())?,
        })?;
        job.observer = Some(telemetry.observer());
        if let Some(url) = telemetry.metrics_url() {
            eprintln!("metrics: {url}");
        }
        if let Some(url) = telemetry.page_url() {
            eprintln!("page: {url}");
        }
        Ok(Some(telemetry))
    }

    #[cfg(feature = "otlp")]
    fn otlp(&self, run_id: &str) -> Result<Option<OtlpConfig>, Failure> {
        let config = self.otlp_endpoint.as_deref().map(|url| {
            let url = Some(url).filter(|url| !url.is_empty());
            OtlpConfig::new(url, run_id, |name| std::env::var(name).ok())
        });
        config.transpose().map_err(Failure::usage)
    }

    #[cfg(not(feature = "otlp"))]
    #[expect(
        clippy::unused_self,
        clippy::unnecessary_wraps,
        reason = "as with the feature"
    )]
    fn otlp(&self, _run_id: &str) -> Result<Option<OtlpConfig>, Failure> {
        Ok(None)
    }
}

/// The program that serves metrics.
pub fn build() -> Build {
    Build {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        commit: env!("TRAINYARD_COMMIT").to_owned(),
    }
}

/// What a file of `trainyard plan --json` predicts.
pub fn prediction(path: Option<&Path>) -> Result<Option<Prediction>, Failure> {
    let Some(path) = path else { return Ok(None) };
    let failed =
        |error: &dyn std::fmt::Display| Failure::new(format!("{}: {error}", path.display()));
    let text = fs::read_to_string(path).map_err(|error| failed(&error))?;
    let prediction = Prediction::read(&text)
        .map_err(|error| failed(&error).hint("write the file with `trainyard plan --json`"))?;
    match prediction {
        Some(prediction) => Ok(Some(prediction)),
        None => Err(failed(
            &"the file contains no plan: nothing fit in memory when it was written",
        )),
    }
}

/// Starts to serve and to push.
pub fn start(config: TelemetryConfig) -> Result<Telemetry, Failure> {
    Telemetry::start(config).map_err(|error| match error {
        TelemetryError::Listen { .. } => {
            Failure::new(error).hint("choose another port, or 0 for a free one")
        }
        TelemetryError::Otlp { .. } | TelemetryError::Thread(_) => Failure::new(error),
    })
}

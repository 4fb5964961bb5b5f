//! The observer of a job that makes its metrics available and serves its page, on a thread of its own.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Instant, SystemTime};

use tokio::runtime::Runtime;
use tokio::sync::watch;
use trainyard_launcher::{Job, JobObserver, Observation, Outcome};

use crate::family::Family;
use crate::otlp::{self, OtlpConfig};
use crate::page::{Prediction, Received, Record, Token};
use crate::server::{Server, Site};
use crate::{Build, JobMetrics, TelemetryError, families};

/// How metrics are made available.
#[derive(Clone, Debug)]
pub struct TelemetryConfig {
    /// The name of the job.
    pub run_id: String,
    /// Whether the job runs already.
    pub is_attached: bool,
    /// The program that does it.
    pub build: Build,
    /// Whether there are also series of each rank.
    pub per_rank: bool,
    /// Where `/metrics` is served.
    pub metrics: Option<SocketAddr>,
    /// Where metrics are pushed to.
    pub otlp: Option<OtlpConfig>,
    /// Where the page is served.
    pub page: Option<SocketAddr>,
    /// What a plan predicts, for the page.
    pub prediction: Option<Prediction>,
}

/// Makes metrics available until it is dropped, which pushes them for the last time.
#[derive(Debug)]
pub struct Telemetry {
    source: Arc<Source>,
    metrics_url: Option<String>,
    page_url: Option<String>,
    /// Dropped to stop the thread.
    stop: Option<watch::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// What is exposed: the metrics of the job, which its launcher updates.
#[derive(Debug)]
pub(crate) struct Source {
    observed: Mutex<Observed>,
    build: Build,
    per_rank: bool,
}

#[derive(Debug)]
struct Observed {
    metrics: JobMetrics,
    record: Record,
}

impl Telemetry {
    /// Begins to serve and to push.
    pub fn start(config: TelemetryConfig) -> Result<Telemetry, TelemetryError> {
        let new = if config.is_attached {
            JobMetrics::attached
        } else {
            JobMetrics::new
        };
        let source = Arc::new(Source {
            observed: Mutex::new(Observed {
                metrics: new(Instant::now()),
                record: Record::new(config.run_id, config.prediction),
            }),
            build: config.build,
            per_rank: config.per_rank,
        });
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let metrics = listen(&runtime, config.metrics, Site::Metrics)?;
        let token = Token::random()?;
        let page = listen(&runtime, config.page, Site::Page(token.clone()))?;
        let url = |server: &Option<Server>, path: &str| {
            let address = server.as_ref().map(|server| server.address);
            address.map(|address| format!("http://{address}/{path}"))
        };
        let metrics_url = url(&metrics, "metrics");
        let page_url = url(&page, &format!("?token={token}"));
        let servers = [metrics, page].into_iter().flatten().collect();
        let (stop, stopped) = watch::channel(());
        let thread = start_thread(runtime, Arc::clone(&source), servers, config.otlp, stopped)?;
        Ok(Telemetry {
            source,
            metrics_url,
            page_url,
            stop: Some(stop),
            thread: Some(thread),
        })
    }

    /// Where metrics are served.
    pub fn metrics_url(&self) -> Option<&str> {
        self.metrics_url.as_deref()
    }

    /// Where the page is served, with the token that it needs.
    pub fn page_url(&self) -> Option<&str> {
        self.page_url.as_deref()
    }

    /// What the launcher tells about the job.
    pub fn observer(&self) -> Arc<dyn JobObserver> {
        Arc::<Source>::clone(&self.source)
    }
}

fn listen(
    runtime: &Runtime,
    address: Option<SocketAddr>,
    site: Site,
) -> Result<Option<Server>, TelemetryError> {
    let Some(address) = address else {
        return Ok(None);
    };
    let bound = runtime.block_on(Server::bind(address, site));
    let bound = bound.map_err(|source| TelemetryError::Listen { address, source })?;
    Ok(Some(bound))
}

impl Drop for Telemetry {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn start_thread(
    runtime: Runtime,
    source: Arc<Source>,
    servers: Vec<Server>,
    otlp: Option<OtlpConfig>,
    mut stopped: watch::Receiver<()>,
) -> io::Result<JoinHandle<()>> {
    let run = async move {
        for server in servers {
            tokio::spawn(server.serve(Arc::clone(&source)));
        }
        match otlp {
            Some(config) => otlp::push_until(stopped, &config, &source).await,
            None => while stopped.changed().await.is_ok() {},
        }
    };
    let thread = thread::Builder::new().name("telemetry".to_owned());
    thread.spawn(move || runtime.block_on(run))
}

impl Source {
    /// The present metrics.
    pub(crate) fn families(&self) -> Vec<Family> {
        let observed = self.observed();
        families(
            &observed.metrics,
            &self.build,
            self.per_rank,
            Instant::now(),
        )
    }

    /// The message with what a page has not received yet.
    pub(crate) fn message(&self, received: Received) -> serde_json::Result<(String, Received)> {
        let observed = self.observed();
        observed.record.message(&observed.metrics, received)
    }

    #[cfg(feature = "otlp")]
    pub(crate) fn build(&self) -> &Build {
        &self.build
    }

    fn observed(&self) -> MutexGuard<'_, Observed> {
        self.observed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl JobObserver for Source {
    fn started(&self, job: &Job) {
        let Observed { metrics, record } = &mut *self.observed();
        metrics.start(job);
        record.start(metrics, &job.faults);
    }

    fn observed(&self, observation: &Observation<'_>) {
        let Observed { metrics, record } = &mut *self.observed();
        metrics.observe(observation, SystemTime::now());
        record.observe(metrics);
    }

    fn ended(&self, outcome: &Outcome) {
        let Observed { metrics, record } = &mut *self.observed();
        metrics.end(outcome);
        record.end(metrics, outcome);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::net::{Ipv4Addr, TcpStream};

    use super::*;
    use crate::job_metrics::tests::status;

    const ANY_PORT: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

    fn serve() -> Result<Telemetry, TelemetryError> {
        Telemetry::start(TelemetryConfig {
            run_id: "night".to_owned(),
            is_attached: false,
            build: Build {
                version: "1".to_owned(),
                commit: "abc".to_owned(),
            },
            per_rank: false,
            metrics: Some(ANY_PORT),
            otlp: None,
            page: Some(ANY_PORT),
            prediction: None,
        })
    }

    /// Sends a GET request; the lines of the response.
    fn get(url: &str) -> io::Result<impl Iterator<Item = String> + use<>> {
        let rest = url
            .strip_prefix("http://")
            .ok_or(io::ErrorKind::InvalidInput)?;
        let (host, path) = rest.split_once('/').ok_or(io::ErrorKind::InvalidInput)?;
        let mut stream = TcpStream::connect(host)?;
        write!(
            stream,
            "GET /{path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
        )?;
        Ok(BufReader::new(stream).lines().map_while(Result::ok))
    }

    fn status_line(url: &str) -> io::Result<String> {
        Ok(get(url)?.next().unwrap_or_default())
    }

    #[test]
    fn the_page_is_only_for_who_has_the_token() -> Result<(), Box<dyn std::error::Error>> {
        let telemetry = serve()?;
        let page = telemetry.page_url().ok_or("no page")?;
        let (address, token) = page.split_once('?').ok_or("no token")?;
        assert_eq!(status_line(page)?, "HTTP/1.1 200 OK");
        assert_eq!(status_line(address)?, "HTTP/1.1 403 Forbidden");
        assert_eq!(
            status_line(&format!("{address}events"))?,
            "HTTP/1.1 403 Forbidden"
        );
        assert_eq!(
            status_line(&format!("{address}events?token=0"))?,
            "HTTP/1.1 403 Forbidden"
        );
        assert_eq!(
            status_line(&format!("{address}metrics?{token}"))?,
            "HTTP/1.1 404 Not Found"
        );
        let metrics = telemetry.metrics_url().ok_or("no metrics")?;
        assert_eq!(status_line(metrics)?, "HTTP/1.1 200 OK");
        let policy =
            get(page)?.find(|line| line.starts_with("content-security-policy: default-src 'none'"));
        assert!(policy.is_some());
        Ok(())
    }

    #[test]
    fn a_page_gets_the_job_as_it_is_and_what_happens_next() -> Result<(), Box<dyn std::error::Error>>
    {
        let telemetry = serve()?;
        let observer = telemetry.observer();
        observer.started(&Job::new("train", 2));
        let ranks = [status(0, 5, 5), status(1, 4, 4)];
        observer.observed(&Observation {
            ranks: &ranks,
            slow_ranks: &[1],
            num_hung: 0,
            now: Instant::now(),
        });
        let page = telemetry.page_url().ok_or("no page")?;
        let mut lines = get(&page.replace("/?", "/events?"))?;
        let mut next = || -> Result<serde_json::Value, Box<dyn std::error::Error>> {
            let data = lines.find_map(|line| Some(line.strip_prefix("data: ")?.to_owned()));
            Ok(serde_json::from_str(&data.ok_or("the stream has ended")?)?)
        };
        let first = next()?;
        assert_eq!(first["run_id"], "night");
        assert_eq!(first["state"]["step"], 4);
        assert_eq!(first["state"]["ranks"][1]["status"], "straggler");
        assert_eq!(first["news"]["samples"].as_array().map(Vec::len), Some(1));
        let kinds = |message: &serde_json::Value| -> Vec<serde_json::Value> {
            let events = message["news"]["events"].as_array().cloned();
            events
                .unwrap_or_default()
                .iter()
                .map(|event| event["kind"].clone())
                .collect()
        };
        assert_eq!(kinds(&first), ["start", "straggler"]);
        observer.ended(&Outcome {
            exits: Vec::new(),
            first_failure: None,
            interrupted_by: None,
        });
        let mut second = next()?;
        while kinds(&second).is_empty() {
            second = next()?;
        }
        assert_eq!(kinds(&second), ["end"]);
        assert_eq!(second["state"]["status"], "stopped");
        Ok(())
    }
}

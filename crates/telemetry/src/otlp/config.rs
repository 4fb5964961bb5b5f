//! Where and how often metrics are pushed: the environment variables that all OpenTelemetry exporters read.

use std::time::Duration;

use reqwest::Url;
use reqwest::header::{HeaderName, HeaderValue};

use crate::TelemetryError;

const METRICS_ENDPOINT: &str = "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT";
const ENDPOINT: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";
const DEFAULT_ENDPOINT: &str = "http://localhost:4318";
/// The path of metrics below the endpoint of a collector.
const METRICS_PATH: &str = "v1/metrics";

/// A collector, and how metrics are pushed to it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct OtlpConfig {
    /// The URL that requests are posted to.
    pub endpoint: String,
    /// Headers of every request, such as credentials.
    pub headers: Vec<(String, String)>,
    /// The time between two pushes.
    pub interval: Duration,
    /// How long a push may take.
    pub timeout: Duration,
    /// What describes the job: `service.name` and others.
    pub attributes: Vec<(String, String)>,
}

impl OtlpConfig {
    /// The configuration by an option and environment variables, which `variable` reads. The option names a collector,
    /// and takes precedence.
    pub fn new(
        endpoint: Option<&str>,
        run_id: &str,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<OtlpConfig, TelemetryError> {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        let own = |name: &str| {
            let metrics = set(&format!("OTEL_EXPORTER_OTLP_METRICS_{name}"));
            metrics.or_else(|| set(&format!("OTEL_EXPORTER_OTLP_{name}")))
        };
        let mut attributes = vec![
            ("service.name".to_owned(), "trainyard".to_owned()),
            ("service.instance.id".to_owned(), run_id.to_owned()),
        ];
        let named = pairs(
            "OTEL_RESOURCE_ATTRIBUTES",
            &set("OTEL_RESOURCE_ATTRIBUTES").unwrap_or_default(),
        )?;
        let service = set("OTEL_SERVICE_NAME").map(|name| ("service.name".to_owned(), name));
        for (name, value) in named.into_iter().chain(service) {
            attributes.retain(|(earlier, _)| *earlier != name);
            attributes.push((name, value));
        }
        let headers = pairs(
            "OTEL_EXPORTER_OTLP_HEADERS",
            &own("HEADERS").unwrap_or_default(),
        )?;
        headers.iter().try_for_each(check_header)?;
        Ok(OtlpConfig {
            endpoint: url(endpoint, set)?,
            headers,
            interval: milliseconds(
                "OTEL_METRIC_EXPORT_INTERVAL",
                set("OTEL_METRIC_EXPORT_INTERVAL"),
                60_000,
            )?,
            timeout: milliseconds("OTEL_EXPORTER_OTLP_TIMEOUT", own("TIMEOUT"), 10_000)?,
            attributes,
        })
    }
}

/// The URL for metrics. The variable for metrics has it; all others name a collector.
fn url(
    option: Option<&str>,
    set: impl Fn(&str) -> Option<String>,
) -> Result<String, TelemetryError> {
    let below = |name: &'static str, base: String| {
        let url = format!("{}/{METRICS_PATH}", base.trim_end_matches('/'));
        (name, url)
    };
    let (name, url) = match (option, set(METRICS_ENDPOINT), set(ENDPOINT)) {
        (Some(base), _, _) => below("--otlp-endpoint", base.to_owned()),
        (None, Some(url), _) => (METRICS_ENDPOINT, url),
        (None, None, Some(base)) => below(ENDPOINT, base),
        (None, None, None) => below(ENDPOINT, DEFAULT_ENDPOINT.to_owned()),
    };
    match Url::parse(&url) {
        Ok(parsed) if ["http", "https"].contains(&parsed.scheme()) => Ok(url),
        Ok(_) => Err(invalid(
            name,
            &url,
            "write http://HOST:PORT or https://HOST:PORT",
        )),
        Err(error) => Err(invalid(name, &url, &error.to_string())),
    }
}

/// `name=value` pairs, separated by commas.
fn pairs(name: &str, list: &str) -> Result<Vec<(String, String)>, TelemetryError> {
    let items = list
        .split(',')
        .map(str::trim)
        .filter(|item| !item.is_empty());
    let pair = |item: &str| match item.split_once('=') {
        Some((key, value)) => Ok((key.trim().to_owned(), percent_decoded(value.trim()))),
        None => Err(invalid(name, list, "write NAME=VALUE, separated by commas")),
    };
    items.map(pair).collect()
}

/// Values are encoded as in URLs; what is not a valid escape stays as it is.
fn percent_decoded(value: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = value.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        let escape = tail
            .get(..2)
            .and_then(|digits| std::str::from_utf8(digits).ok());
        let escaped = escape.and_then(|digits| u8::from_str_radix(digits, 16).ok());
        match escaped.filter(|_| first == b'%') {
            Some(byte) => {
                bytes.push(byte);
                rest = &tail[2..];
            }
            None => {
                bytes.push(first);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn check_header((name, value): &(String, String)) -> Result<(), TelemetryError> {
    let is_valid =
        HeaderName::from_bytes(name.as_bytes()).is_ok() && HeaderValue::from_str(value).is_ok();
    if is_valid {
        Ok(())
    } else {
        // The value may be a secret.
        Err(invalid(
            "OTEL_EXPORTER_OTLP_HEADERS",
            &format!("{name}=..."),
            "this is not an HTTP header",
        ))
    }
}

fn milliseconds(
    name: &str,
    value: Option<String>,
    default: u64,
) -> Result<Duration, TelemetryError> {
    let Some(value) = value else {
        return Ok(Duration::from_millis(default));
    };
    match value.parse() {
        Ok(number) if number > 0 => Ok(Duration::from_millis(number)),
        _ => Err(invalid(
            name,
            &value,
            "write a positive number of milliseconds",
        )),
    }
}

fn invalid(name: &str, value: &str, reason: &str) -> TelemetryError {
    TelemetryError::Otlp {
        name: name.to_owned(),
        value: value.to_owned(),
        reason: reason.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn config(option: Option<&str>, variables: &[(&str, &str)]) -> Result<OtlpConfig, String> {
        let variables: BTreeMap<&str, &str> = variables.iter().copied().collect();
        let read = |name: &str| variables.get(name).map(|value| (*value).to_owned());
        OtlpConfig::new(option, "run7", read).map_err(|error| error.to_string())
    }

    #[test]
    fn the_endpoint_is_that_of_the_option_of_metrics_or_of_the_collector() {
        let endpoint = |option, variables: &[_]| config(option, variables).unwrap().endpoint;
        assert_eq!(endpoint(None, &[]), "http://localhost:4318/v1/metrics");
        let collector = (ENDPOINT, "https://otel:1/base/");
        assert_eq!(
            endpoint(None, &[collector]),
            "https://otel:1/base/v1/metrics"
        );
        let metrics = (METRICS_ENDPOINT, "http://m/push");
        assert_eq!(endpoint(None, &[collector, metrics]), "http://m/push");
        assert_eq!(
            endpoint(Some("http://o:2"), &[metrics]),
            "http://o:2/v1/metrics"
        );
        assert!(
            config(Some("o:2"), &[])
                .unwrap_err()
                .contains("--otlp-endpoint")
        );
    }

    #[test]
    fn standard_variables_are_read() {
        let read = config(
            None,
            &[
                ("OTEL_EXPORTER_OTLP_HEADERS", "api-key=a%20b, other=c"),
                ("OTEL_METRIC_EXPORT_INTERVAL", "500"),
                ("OTEL_RESOURCE_ATTRIBUTES", "service.name=x,team=nlp"),
                ("OTEL_SERVICE_NAME", "llama"),
            ],
        );
        let read = read.unwrap();
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        assert_eq!(read.headers, [pair("api-key", "a b"), pair("other", "c")]);
        assert_eq!(read.interval, Duration::from_millis(500));
        let attributes = [
            pair("service.instance.id", "run7"),
            pair("team", "nlp"),
            pair("service.name", "llama"),
        ];
        assert_eq!(read.attributes, attributes);
        let rejected = config(None, &[("OTEL_METRIC_EXPORT_INTERVAL", "soon")]).unwrap_err();
        assert!(
            rejected.contains("OTEL_METRIC_EXPORT_INTERVAL=soon"),
            "{rejected}"
        );
        let secret = config(None, &[("OTEL_EXPORTER_OTLP_HEADERS", "a b=secret")]).unwrap_err();
        assert!(!secret.contains("secret"), "{secret}");
    }
}

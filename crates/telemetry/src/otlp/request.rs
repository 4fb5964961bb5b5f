//! The body of a push: `ExportMetricsServiceRequest` in JSON, where 64-bit integers are strings.

use std::time::SystemTime;

use serde_json::{Value as Json, json};
use trainyard_heartbeat::StepHistogram;

use super::OtlpConfig;
use crate::Build;
use crate::family::{Family, Kind, Sample, Value};

/// The enumerator `AGGREGATION_TEMPORALITY_CUMULATIVE`: values are those since the start.
const CUMULATIVE: u8 = 2;

/// All families that have series, as measured `now` by a program that `began` then.
pub(super) fn body(
    config: &OtlpConfig,
    build: &Build,
    families: &[Family],
    began: SystemTime,
    now: SystemTime,
) -> Json {
    let times = Times {
        began: nanoseconds(began),
        now: nanoseconds(now),
    };
    let present = families.iter().filter(|family| !family.samples.is_empty());
    let metrics: Vec<Json> = present.map(|family| metric(family, &times)).collect();
    let version = ("service.version".to_owned(), build.version.clone());
    let of_resource = config.attributes.iter().chain([&version]);
    json!({
        "resourceMetrics": [{
            "resource": {"attributes": attributes(of_resource.map(|(name, value)| (name.as_str(), value.as_str())))},
            "scopeMetrics": [{
                "scope": {"name": "trainyard", "version": build.version},
                "metrics": metrics,
            }],
        }],
    })
}

/// When counting began, and when the values were measured.
struct Times {
    began: String,
    now: String,
}

fn metric(family: &Family, times: &Times) -> Json {
    let points: Vec<Json> = family
        .samples
        .iter()
        .map(|sample| point(sample, times))
        .collect();
    let mut metric = json!({
        "name": family.name,
        "description": family.help,
        "unit": unit(family.unit),
    });
    let (data, value) = match family.kind {
        Kind::Gauge | Kind::StateSet | Kind::Info => ("gauge", json!({"dataPoints": points})),
        Kind::Counter => (
            "sum",
            json!({"dataPoints": points, "aggregationTemporality": CUMULATIVE, "isMonotonic": true}),
        ),
        Kind::Histogram => (
            "histogram",
            json!({"dataPoints": points, "aggregationTemporality": CUMULATIVE}),
        ),
    };
    metric[data] = value;
    metric
}

fn point(sample: &Sample, times: &Times) -> Json {
    let labels = sample
        .labels
        .iter()
        .map(|(name, value)| (*name, value.as_str()));
    let mut point = json!({
        "attributes": attributes(labels),
        "startTimeUnixNano": times.began,
        "timeUnixNano": times.now,
    });
    match &sample.value {
        Value::Number(value) if value.is_finite() => point["asDouble"] = json!(value),
        // As protobuf's JSON encoding spells it.
        Value::Number(_) => point["asDouble"] = json!("NaN"),
        Value::Histogram(histogram) => {
            let counts = histogram.counts.iter().map(u64::to_string);
            point["count"] = json!(histogram.count().to_string());
            point["sum"] = json!(histogram.sum_seconds);
            point["bucketCounts"] = counts.collect();
            point["explicitBounds"] = json!(StepHistogram::BOUNDS);
        }
    }
    point
}

fn attributes<'a>(pairs: impl Iterator<Item = (&'a str, &'a str)>) -> Json {
    pairs
        .map(|(name, value)| json!({"key": name, "value": {"stringValue": value}}))
        .collect()
}

/// The unit in the code that OpenTelemetry uses, UCUM.
fn unit(unit: &str) -> &str {
    match unit {
        "seconds" => "s",
        "bytes" => "By",
        "ratio" => "1",
        other => other,
    }
}

fn nanoseconds(time: SystemTime) -> String {
    let since = time.duration_since(SystemTime::UNIX_EPOCH);
    since.unwrap_or_default().as_nanos().to_string()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn kinds_become_those_of_opentelemetry() {
        let config = OtlpConfig::new(None, "run7", |_| None).unwrap();
        let build = Build {
            version: "1.2".to_owned(),
            commit: "abc".to_owned(),
        };
        let mut histogram = StepHistogram::default();
        histogram.record(Duration::from_secs(400));
        let families = [
            Family::new(Kind::Counter, "t_sent_bytes", "bytes", "Sent.")
                .with_all([(vec![("purpose", "gradient".to_owned())], 7.0)]),
            Family::new(Kind::Gauge, "t_loss", "", "Loss.").with(Some(f64::NAN)),
            Family::new(Kind::Gauge, "t_absent", "", "Nothing."),
            Family::new(Kind::Histogram, "t_step_seconds", "seconds", "Steps.")
                .with_histogram(histogram),
        ];
        let began = SystemTime::UNIX_EPOCH + Duration::from_secs(5);
        let body = body(
            &config,
            &build,
            &families,
            began,
            began + Duration::from_secs(1),
        );
        let metrics = &body["resourceMetrics"][0]["scopeMetrics"][0]["metrics"];
        assert_eq!(metrics.as_array().map(Vec::len), Some(3));
        let sent = &metrics[0];
        assert_eq!(
            (&sent["unit"], &sent["sum"]["isMonotonic"]),
            (&json!("By"), &json!(true))
        );
        let point = &sent["sum"]["dataPoints"][0];
        assert_eq!(point["asDouble"], 7.0);
        assert_eq!(point["startTimeUnixNano"], "5000000000");
        assert_eq!(point["timeUnixNano"], "6000000000");
        assert_eq!(point["attributes"][0]["value"]["stringValue"], "gradient");
        assert_eq!(metrics[1]["gauge"]["dataPoints"][0]["asDouble"], "NaN");
        let steps = &metrics[2]["histogram"]["dataPoints"][0];
        assert_eq!(
            (&steps["count"], &steps["bucketCounts"][14]),
            (&json!("1"), &json!("1"))
        );
        let resource = &body["resourceMetrics"][0]["resource"]["attributes"];
        assert_eq!(
            resource[0],
            json!({"key": "service.name", "value": {"stringValue": "trainyard"}})
        );
    }
}

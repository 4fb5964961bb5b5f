//! Metric families as text that Prometheus reads: OpenMetrics, and the older text format for all other readers.

use std::fmt::Write;

use trainyard_heartbeat::StepHistogram;

use crate::family::{Family, Kind, Sample, Value};

/// The formats of the text.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Format {
    /// OpenMetrics 1.0.
    OpenMetrics,
    /// Version 0.0.4 of Prometheus' own format, which knows neither units nor state sets.
    Prometheus,
}

impl Format {
    /// The format for a client that accepts these media types.
    pub fn accepted(accept: &str) -> Format {
        if accept.contains("application/openmetrics-text") {
            Format::OpenMetrics
        } else {
            Format::Prometheus
        }
    }

    /// The media type of the text.
    pub fn content_type(self) -> &'static str {
        match self {
            Format::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Format::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
        }
    }
}

/// The text of all families that have series.
pub fn exposition(families: &[Family], format: Format) -> String {
    let mut text = String::new();
    for family in families {
        if !family.samples.is_empty() {
            write_family(&mut text, family, format);
        }
    }
    if format == Format::OpenMetrics {
        text.push_str("# EOF\n");
    }
    text
}

fn write_family(text: &mut String, family: &Family, format: Format) {
    let name = match format {
        Format::OpenMetrics => family.name.to_owned(),
        Format::Prometheus => format!("{}{}", family.name, suffix(family.kind)),
    };
    let _ = writeln!(text, "# HELP {name} {}", family.help);
    let _ = writeln!(text, "# TYPE {name} {}", type_name(family.kind, format));
    if format == Format::OpenMetrics && !family.unit.is_empty() {
        let _ = writeln!(text, "# UNIT {name} {}", family.unit);
    }
    for sample in &family.samples {
        match &sample.value {
            Value::Number(value) => {
                let name = format!("{}{}", family.name, suffix(family.kind));
                write_sample(text, &name, &sample.labels, *value);
            }
            Value::Histogram(histogram) => write_histogram(text, family.name, sample, histogram),
        }
    }
}

/// What the names of series have behind that of their family.
fn suffix(kind: Kind) -> &'static str {
    match kind {
        Kind::Counter => "_total",
        Kind::Info => "_info",
        Kind::Gauge | Kind::Histogram | Kind::StateSet => "",
    }
}

fn type_name(kind: Kind, format: Format) -> &'static str {
    match (kind, format) {
        (Kind::Counter, _) => "counter",
        (Kind::Histogram, _) => "histogram",
        (Kind::StateSet, Format::OpenMetrics) => "stateset",
        (Kind::Info, Format::OpenMetrics) => "info",
        (Kind::Gauge | Kind::StateSet | Kind::Info, _) => "gauge",
    }
}

fn write_histogram(text: &mut String, name: &str, sample: &Sample, histogram: &StepHistogram) {
    let bounds = StepHistogram::BOUNDS.into_iter().chain([f64::INFINITY]);
    let mut count = 0;
    for (bound, in_bucket) in bounds.zip(histogram.counts) {
        count += in_bucket;
        let mut labels = sample.labels.clone();
        labels.push(("le", number(bound)));
        write_sample(text, &format!("{name}_bucket"), &labels, count as f64);
    }
    let labels = &sample.labels;
    write_sample(text, &format!("{name}_sum"), labels, histogram.sum_seconds);
    write_sample(text, &format!("{name}_count"), labels, count as f64);
}

fn write_sample(text: &mut String, name: &str, labels: &[(&'static str, String)], value: f64) {
    text.push_str(name);
    let labels: Vec<String> = labels
        .iter()
        .map(|(name, value)| format!("{name}=\"{}\"", escaped(value)))
        .collect();
    if !labels.is_empty() {
        let _ = write!(text, "{{{}}}", labels.join(","));
    }
    let _ = writeln!(text, " {}", number(value));
}

fn number(value: f64) -> String {
    if value.is_nan() {
        "NaN".to_owned()
    } else if value.is_infinite() {
        if value > 0.0 { "+Inf" } else { "-Inf" }.to_owned()
    } else {
        // Always with a fraction or an exponent, as OpenMetrics asks for in `le`.
        format!("{value:?}")
    }
}

fn escaped(value: &str) -> String {
    let value = value.replace('\\', "\\\\").replace('"', "\\\"");
    value.replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn both_formats_describe_the_same_series() {
        let restarts = vec![("cause", "a \"b\"\\\n".to_owned())];
        let mut histogram = StepHistogram::default();
        histogram.record(Duration::from_millis(20));
        let families = [
            Family::new(Kind::Counter, "t_restarts", "", "Restarts.").with_all([(restarts, 2.0)]),
            Family::new(Kind::Gauge, "t_loss", "", "Loss.").with(Some(f64::NAN)),
            Family::new(Kind::Gauge, "t_absent", "", "Nothing.").with(None),
            Family::new(Kind::Histogram, "t_step_seconds", "seconds", "Steps.")
                .with_histogram(histogram),
            Family::new(Kind::Info, "t_build", "", "Build.")
                .with_all([(vec![("version", "1".to_owned())], 1.0)]),
        ];
        let text = exposition(&families, Format::OpenMetrics);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[..3],
            [
                "# HELP t_restarts Restarts.",
                "# TYPE t_restarts counter",
                "t_restarts_total{cause=\"a \\\"b\\\"\\\\\\n\"} 2.0"
            ]
        );
        assert!(lines.contains(&"t_loss NaN"));
        assert!(lines.contains(&"# UNIT t_step_seconds seconds"));
        assert!(lines.contains(&"t_step_seconds_bucket{le=\"0.01\"} 0.0"));
        assert!(lines.contains(&"t_step_seconds_bucket{le=\"+Inf\"} 1.0"));
        assert!(lines.contains(&"# TYPE t_build info"));
        assert!(!text.contains("t_absent"));
        assert_eq!(lines.last(), Some(&"# EOF"));
        let series = |text: &str| -> Vec<String> {
            let series = text.lines().filter(|line| !line.starts_with('#'));
            series.map(str::to_owned).collect()
        };
        let older = exposition(&families, Format::Prometheus);
        assert_eq!(series(&older), series(&text));
        assert!(older.contains("# TYPE t_restarts_total counter"));
        assert!(older.contains("# TYPE t_build_info gauge"));
        assert!(!older.contains("# UNIT") && !older.contains("# EOF"));
    }
}

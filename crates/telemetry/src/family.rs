//! Metric families: what is measured, independent of the format in which it is sent.

use trainyard_heartbeat::StepHistogram;

/// All series of one metric.
#[derive(Clone, Debug, PartialEq)]
pub struct Family {
    /// The name, which ends in the unit; for counters without `_total`.
    pub name: &'static str,
    /// One sentence about it.
    pub help: &'static str,
    /// Its unit, in the plural as in `seconds`; empty if it has none.
    pub unit: &'static str,
    /// What kind of values it has.
    pub kind: Kind,
    /// Its series.
    pub samples: Vec<Sample>,
}

/// The kinds of metrics.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Kind {
    /// A value that rises and falls.
    Gauge,
    /// A value that only rises.
    Counter,
    /// A distribution.
    Histogram,
    /// Which of several states holds; the label that names them is the family itself.
    StateSet,
    /// Facts, in labels; the value is 1.
    Info,
}

/// A series.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// Names and values of labels.
    pub labels: Vec<(&'static str, String)>,
    /// The value.
    pub value: Value,
}

/// The value of a series.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// A number.
    Number(f64),
    /// A distribution of step times.
    Histogram(StepHistogram),
}

impl Family {
    /// A family without series.
    pub fn new(kind: Kind, name: &'static str, unit: &'static str, help: &'static str) -> Family {
        debug_assert!(name.ends_with(unit), "{name} must end in its unit {unit}");
        Family {
            name,
            help,
            unit,
            kind,
            samples: Vec::new(),
        }
    }

    /// Adds a series without labels, if there is a value.
    pub fn with(self, value: Option<f64>) -> Family {
        self.with_all(value.map(|value| (Vec::new(), value)))
    }

    /// Adds series.
    pub fn with_all(
        mut self,
        series: impl IntoIterator<Item = (Vec<(&'static str, String)>, f64)>,
    ) -> Family {
        let samples = series.into_iter().map(|(labels, value)| Sample {
            labels,
            value: Value::Number(value),
        });
        self.samples.extend(samples);
        self
    }

    /// Adds a distribution.
    pub fn with_histogram(mut self, histogram: StepHistogram) -> Family {
        self.samples.push(Sample {
            labels: Vec::new(),
            value: Value::Histogram(histogram),
        });
        self
    }
}

//! From which bandwidth on methods for slow networks pay: tables, and the same in JSON.

use std::fmt::Write;

use serde_json::{Value, json};
use trainyard_plan::{
    Estimate, MethodRow, MethodTable, ReplicaUnit, Sites, Synchronization, Threshold,
    between_nodes, between_sites,
};

use super::Report;
use super::table::{Style, table, wrapped};

/// The round trips between two sites, in milliseconds: within a continent, and between two.
const ROUND_TRIPS_MS: [f64; 2] = [30.0, 100.0];

const EXPLANATION: &str = "A number is how many times as many samples per second a method trains as gradients in every step, with \
    the same strategy inside a replica (a worker of a parameter server is one GPU); * marks where that is at least what it needs. `needs` stands for the effect on \
    convergence, which the planner does not predict. Methods that the strategy does not support, or that do not fit, are left out.";

impl Report {
    /// Adds the tables of all methods: between nodes on Ethernet, and between sites.
    pub fn compare_methods(&mut self) {
        let request = &self.request;
        let own = request.cluster.sites.as_ref().map(Sites::round_trip_ms);
        let own = own.filter(|own| !ROUND_TRIPS_MS.contains(own));
        let round_trips = own.into_iter().chain(ROUND_TRIPS_MS);
        let sites = round_trips.filter_map(|round_trip| between_sites(request, round_trip));
        self.slow_network = between_nodes(request).into_iter().chain(sites).collect();
    }

    pub(super) fn slow_network_text(&self, style: Style) -> String {
        let mut text = String::new();
        for methods in &self.slow_network {
            let _ = write!(
                text,
                "\n{}{}",
                wrapped(&heading(methods)),
                method_table(methods, style)
            );
        }
        if !text.is_empty() {
            let _ = write!(text, "\n{}", wrapped(EXPLANATION));
        }
        text
    }

    pub(super) fn slow_network_json(&self) -> Value {
        self.slow_network.iter().map(table_json).collect()
    }
}

fn heading(methods: &MethodTable) -> String {
    let MethodTable {
        unit,
        num_replicas,
        round_trip_ms,
        strategy,
        ..
    } = methods;
    format!(
        "Between {num_replicas} {}{}, round trip {round_trip_ms} ms, with {}, ZeRO {}:",
        unit.plural(),
        match unit {
            ReplicaUnit::Node => " on Ethernet",
            ReplicaUnit::Site => "",
        },
        strategy.degrees,
        strategy.zero_stage
    )
}

fn method_table(methods: &MethodTable, style: Style) -> String {
    let headings = methods.gbit_s.iter().map(|gbit_s| format!("{gbit_s} Gb/s"));
    let headings: Vec<String> = headings.collect();
    let [a, b, c, d] = [0, 1, 2, 3].map(|index| headings.get(index).map_or("", String::as_str));
    let rows: Vec<_> = methods.methods.iter().map(row).collect();
    table(["exchange", "needs", a, b, c, d, "pays"], [0], &rows, style)
}

fn row(method: &MethodRow) -> [String; 7] {
    let is_plain = method.synchronization == Synchronization::PLAIN;
    let cell = |index: usize| {
        let estimate = method.estimates.get(index);
        estimate.map_or_else(String::new, |estimate| describe(is_plain, estimate))
    };
    let needs = if is_plain {
        "-".to_owned()
    } else {
        format!("{:.2}x", method.synchronization.required_speedup())
    };
    [
        method.synchronization.to_string(),
        needs,
        cell(0),
        cell(1),
        cell(2),
        cell(3),
        describe_threshold(is_plain, method.pays),
    ]
}

fn describe(is_plain: bool, estimate: &Estimate) -> String {
    if is_plain {
        return format!("{:.2} s", estimate.seconds);
    }
    let mark = if estimate.pays { "*" } else { "" };
    format!("{:.2}x{mark}", estimate.speedup)
}

fn describe_threshold(is_plain: bool, threshold: Threshold) -> String {
    match threshold {
        _ if is_plain => "-".to_owned(),
        Threshold::Never => "never".to_owned(),
        Threshold::Always => "always".to_owned(),
        Threshold::Below(most) => format!("below {}", describe_gbit_s(most)),
        Threshold::Above(least) => format!("above {}", describe_gbit_s(least)),
        Threshold::Between(least, most) => format!("{least:.0} to {}", describe_gbit_s(most)),
    }
}

fn describe_gbit_s(gbit_s: f64) -> String {
    let decimals = usize::from(gbit_s < 10.0);
    format!("{gbit_s:.decimals$} Gb/s")
}

fn table_json(methods: &MethodTable) -> Value {
    json!({
        "between": methods.unit.plural(),
        "num_replicas": methods.num_replicas,
        "round_trip_ms": methods.round_trip_ms,
        "gbit_s": methods.gbit_s,
        "mesh": methods.strategy.degrees,
        "zero_stage": methods.strategy.zero_stage,
        "methods": methods.methods.iter().map(method_json).collect::<Vec<_>>(),
    })
}

fn method_json(method: &MethodRow) -> Value {
    let estimates = method.estimates.iter();
    // A limit is null if there is none.
    let (above, below) = match method.pays {
        Threshold::Never | Threshold::Always => (None, None),
        Threshold::Below(most) => (None, Some(most)),
        Threshold::Above(least) => (Some(least), None),
        Threshold::Between(least, most) => (Some(least), Some(most)),
    };
    json!({
        "synchronization": method.synchronization,
        "required_speedup": method.synchronization.required_speedup(),
        "step_seconds": estimates.clone().map(|each| each.seconds).collect::<Vec<_>>(),
        "speedup": estimates.map(|each| each.speedup).collect::<Vec<_>>(),
        "pays": method.pays != Threshold::Never,
        "pays_above_gbit_s": above,
        "pays_below_gbit_s": below,
    })
}

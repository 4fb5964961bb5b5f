//! What the simulated accelerator found in a world of ranks.
//!
//! `TRAINYARD_GPU_LIBRARY` with the path of its library runs every suite on it. Each rank then writes a report when it
//! exits: hazards, which fail the suite, and the host synchronizations within training steps, which are printed.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::Path;

use serde::Deserialize;

/// The environment variable with the GPU library of the accelerator.
const LIBRARY: &str = "TRAINYARD_GPU_LIBRARY";

/// The report of one rank.
#[derive(Debug, Default, Deserialize)]
struct Report {
    steps: u64,
    /// By cause and operator.
    synchronizations_in_steps: BTreeMap<String, u64>,
    hazards: Vec<String>,
}

/// The environment of ranks that write reports into `folder`; empty on other devices.
pub(crate) fn environment(folder: &Path, num_ranks: usize) -> Vec<(&'static str, OsString)> {
    if std::env::var_os(LIBRARY).is_none() {
        return Vec::new();
    }
    vec![
        ("TRAINYARD_SIM_GPUS", num_ranks.to_string().into()),
        ("TRAINYARD_SIM_REPORT", folder.join("accelerator.%r").into()),
    ]
}

/// The hazards of all ranks, a line each.
pub(crate) fn hazards(folder: &Path, num_ranks: usize) -> Option<String> {
    let lines: Vec<String> = (0..num_ranks)
        .flat_map(|rank| {
            let hazards = read(folder, rank).hazards.into_iter();
            hazards.map(move |hazard| format!("rank {rank}: {hazard}\n"))
        })
        .collect();
    (!lines.is_empty()).then(|| lines.concat())
}

/// Host synchronizations within the training steps of rank 0, a line per cause.
pub(crate) fn synchronizations(folder: &Path) -> String {
    let report = read(folder, 0);
    let line = |(cause, count): (&String, &u64)| {
        format!(
            "             host synchronization in {} steps: {count} x {cause}\n",
            report.steps
        )
    };
    report.synchronizations_in_steps.iter().map(line).collect()
}

/// An empty report if the rank wrote none, because it died or because the device is another one.
fn read(folder: &Path, rank: usize) -> Report {
    let text = fs::read_to_string(folder.join(format!("accelerator.{rank}")));
    text.ok()
        .and_then(|text| serde_json::from_str(&text).ok())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_of_all_ranks_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let report = r#"{"kernels": 9, "steps": 3, "host_synchronizations": {"item": 4},
            "synchronizations_in_steps": {"item: aten::_local_scalar_dense": 3}, "hazards": ["stream race"]}"#;
        fs::write(folder.path().join("accelerator.1"), report).unwrap();
        assert_eq!(hazards(folder.path(), 2).unwrap(), "rank 1: stream race\n");
        assert_eq!(hazards(folder.path(), 1), None);
        fs::write(folder.path().join("accelerator.0"), report).unwrap();
        let text = synchronizations(folder.path());
        assert!(text.contains("3 steps: 3 x item"), "{text}");
    }
}

//! `verify` passes for correct strategies and detects a wrong one.

use std::process::Output;

use libtest_mimic::Failed;
use serde_json::Value;
use trainyard_conformance::programs::{describe, json};

use super::trainyard;

/// The rows of the table that `verify` prints, with their types.
fn rows(report: &Value) -> Vec<(String, Value)> {
    let comparisons = report["comparisons"].as_array().into_iter().flatten();
    comparisons
        .flat_map(|comparison| {
            let types = comparison["types"].as_str().unwrap_or_default().to_owned();
            let rows = comparison["rows"].as_array().cloned().unwrap_or_default();
            rows.into_iter().map(move |row| (types.clone(), row))
        })
        .collect()
}

fn is_within(row: &Value) -> bool {
    row["worst"].as_f64() <= row["allowed"].as_f64() && row["worst"].is_number()
}

fn assert_passes(output: &Output, types: &[&str]) -> Result<(), Failed> {
    assert!(output.status.success(), "{}", describe(output));
    let report: Value = json(output)?;
    assert_eq!(report["passed"], true, "{report}");
    let rows = rows(&report);
    for each in types {
        assert!(
            rows.iter().filter(|(t, _)| t == each).count() >= 6,
            "{each} in {report}"
        );
    }
    assert!(rows.iter().all(|(_, row)| is_within(row)), "{report}");
    Ok(())
}

pub fn verify_passes() -> Result<(), Failed> {
    let output = trainyard("verify configs/llama-tiny.toml --nproc 2 --json")?.output()?;
    assert_passes(&output, &["float64", "float32"])
}

pub fn verify_sharded() -> Result<(), Failed> {
    for stage in 1..=3 {
        let line = format!(
            "verify configs/llama-tiny.toml --nproc 2 --steps 3 --json \
             --parallelism.data_parallel_shard_degree -1 --parallelism.zero_stage {stage}"
        );
        let output = trainyard(&line)?.output()?;
        assert_passes(&output, &["float64", "float32"])?;
    }
    Ok(())
}

/// Parameter servers without staleness equal one rank, and so do workers that take a step of their own, on one rank or on a mesh;
/// the bytes are those of the closed form, and a dry run knows them.
pub fn verify_served() -> Result<(), Failed> {
    let local_updates = "--local_updates.method diloco --local_updates.sync_steps 2";
    let mesh = format!("--nproc 4 --servers 1 --nproc-per-worker 2 {local_updates}");
    for (job, types) in [
        (
            "--nproc 2 --servers 1 --parameter_server.staleness 0".to_owned(),
            &["float64", "float32"][..],
        ),
        (format!("--nproc 2 --servers 2 {local_updates}"), &[]),
        (
            format!("{mesh} --parallelism.tensor_parallel_degree 2"),
            &[],
        ),
        (
            format!("{mesh} --parallelism.pipeline_parallel_degree 2"),
            &[],
        ),
    ] {
        let line = format!("verify configs/llama-tiny.toml --steps 4 --json {job}");
        let output = trainyard(&line)?.output()?;
        assert_passes(&output, types)?;
        assert!(describe(&output).contains("bytes pushed"), "{job}");
    }
    let line = "dry-run configs/llama-tiny.toml --world 2 --servers 2 --json";
    let found: Value = json(&trainyard(line)?.output()?)?;
    let transfers = found["worker"]["collectives"].as_array();
    let purposes = transfers.into_iter().flatten().map(|row| &row["purpose"]);
    assert_eq!(purposes.collect::<Vec<_>>(), ["gradient", "parameter"]);
    assert!(
        found["server"]["states"]["optimizer"].as_u64() > Some(0),
        "{found}"
    );
    Ok(())
}

pub fn verify_layers() -> Result<(), Failed> {
    verify_activations(&[
        "configs/llama-tiny-tp.toml --nproc 2",
        "configs/llama-tiny-cp.toml --nproc 2",
    ])
}

pub fn verify_all_layers() -> Result<(), Failed> {
    verify_activations(&[
        "configs/llama-tiny-tp.toml --nproc 2 --parallelism.sequence_parallel_regather true",
        "configs/llama-tiny-tp.toml --nproc 4 --parallelism.data_parallel_shard_degree -1",
        "configs/llama-tiny-3d.toml --nproc 8",
        "configs/llama-tiny-cp.toml --nproc 2 --parallelism.context_parallel_method ulysses",
    ])?;
    let line = "verify configs/llama3-405b.toml --nproc 8 --shrink --steps 2 --json";
    assert_passes(&trainyard(line)?.output()?, &["float64", "bfloat16"])
}

/// Each job passes, and the bytes of its activations are among what was compared.
fn verify_activations(jobs: &[&str]) -> Result<(), Failed> {
    for job in jobs {
        let output = trainyard(&format!("verify {job} --steps 3 --json"))?.output()?;
        assert_passes(&output, &["float64", "float32"])?;
        assert!(describe(&output).contains("activation bytes sent"), "{job}");
    }
    Ok(())
}

pub fn verify_notices() -> Result<(), Failed> {
    let line = "verify configs/llama-tiny.toml --nproc 2 --steps 2 --json --inject-fault unreduced-gradient";
    let output = trainyard(line)?.output()?;
    assert_eq!(output.status.code(), Some(1), "{}", describe(&output));
    let report: Value = json(&output)?;
    assert_eq!(report["passed"], false, "{report}");
    for types in ["float64", "float32"] {
        let failed: Vec<Value> = rows(&report)
            .into_iter()
            .filter(|(t, row)| t == types && !is_within(row))
            .map(|(_, row)| row)
            .collect();
        let names_a_parameter = |row: &Value| {
            row["what"]
                .as_str()
                .is_some_and(|what| what.contains("parameters"))
                && row["at"].as_str().is_some_and(|at| at.contains(".weight"))
        };
        assert!(failed.iter().any(names_a_parameter), "{types}: {failed:?}");
    }
    Ok(())
}

pub fn verify_shrinks() -> Result<(), Failed> {
    let line = "verify configs/llama3-70b.toml --nproc 2 --shrink --json";
    assert_passes(&trainyard(line)?.output()?, &["float64", "bfloat16"])
}

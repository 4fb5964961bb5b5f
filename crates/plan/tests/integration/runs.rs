//! Published measurements: tables of `published`, and vTrain's runs, which belong to another repository.

#![allow(dead_code)]

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use trainyard_arch::DecoderConfig;

use trainyard_plan::{
    Cluster, Constants, Degrees, Offload, PipelineLayout, Precision, Recompute, Run, Software,
    Strategy, Synchronization,
};
use trainyard_schedule::ScheduleKind;

/// A row of a CSV file, by column name.
pub type Row = HashMap<String, String>;

/// The rows of one of the tables in `published`, each of which names its source.
pub fn published(name: &str) -> Vec<Row> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("published");
    let text = fs::read_to_string(folder.join(name).with_extension("csv")).unwrap();
    parsed(text.lines().filter(|line| !line.starts_with('#')))
}

/// The rows of a file of vTrain, from the folder that `TRAINYARD_VTRAIN` names; `None` without it.
pub fn vtrain_rows(file: &str) -> Option<Vec<Row>> {
    let Some(folder) = std::env::var_os("TRAINYARD_VTRAIN") else {
        eprintln!("skipped: TRAINYARD_VTRAIN names no folder with {file}");
        return None;
    };
    let text = fs::read_to_string(Path::new(&folder).join(file)).unwrap();
    Some(parsed(text.trim_start_matches('\u{feff}').lines()))
}

/// The rows of a CSV file with a header.
fn parsed<'a>(mut lines: impl Iterator<Item = &'a str>) -> Vec<Row> {
    let names = fields(lines.next().unwrap());
    lines
        .map(|line| names.iter().cloned().zip(fields(line)).collect())
        .collect()
}

/// The fields of a CSV line, some of them quoted.
fn fields(line: &str) -> Vec<String> {
    let mut fields = vec![String::new()];
    let mut quoted = false;
    for character in line.chars() {
        match character {
            '"' => quoted = !quoted,
            ',' if !quoted => fields.push(String::new()),
            other => fields.last_mut().unwrap().push(other),
        }
    }
    fields
}

/// A whole number of a row, if the field has one.
pub fn number(row: &Row, key: &str) -> Option<usize> {
    row.get(key)?.parse().ok()
}

/// A whole number that a row must have.
pub fn need(row: &Row, key: &str) -> usize {
    number(row, key).unwrap_or_else(|| panic!("{key} in {row:?}"))
}

/// A decimal number of a row, if the field has one.
pub fn decimal(row: &Row, key: &str) -> Option<f64> {
    row.get(key)?.parse().ok()
}

/// The value of `key=value` in the note of a row.
pub fn noted(row: &Row, key: &str) -> Option<f64> {
    let notes = row.get("note")?.split(';');
    let mut found = notes.filter_map(|note| note.strip_prefix(key)?.strip_prefix('='));
    found.next()?.parse().ok()
}

/// The precision of Megatron in 2021: 16-bit gradients, 20 bytes of states per parameter.
pub const HALF: Precision = Precision {
    compute: 2,
    parameter: 2,
    gradient: 2,
    reduced: 2,
    optimizer: 16,
};

/// A strategy with Megatron's degrees; the data-parallel degree is `dp_shard`.
pub fn strategy(tp: usize, dp: usize, pp: usize, chunks: usize) -> Strategy {
    Strategy {
        degrees: Degrees {
            pp,
            dp_shard: dp,
            tp,
            ..Degrees::ONE
        },
        zero_stage: 0,
        sequence_parallel: false,
        pipeline: PipelineLayout {
            schedule: match chunks {
                1 => ScheduleKind::OneForwardOneBackward,
                _ => ScheduleKind::Interleaved,
            },
            stages_per_rank: chunks,
        },
        global_batch: 1,
        micro_batch: 1,
        seq_len: 2048,
        recompute: Recompute::None,
        offload: Offload::None,
        precision: HALF,
        synchronization: Synchronization::PLAIN,
        split_points: Vec::new(),
    }
}

/// The runs of vTrain (Megatron on A100): without recomputation on one node, with full recomputation on many.
pub fn vtrain<'a>(file: &str, recompute: Recompute, cluster: &'a Cluster) -> Option<Vec<Run<'a>>> {
    let rows = vtrain_rows(file)?;
    let run = |row: &Row| {
        let get = |key: &str| number(row, key).unwrap_or_else(|| panic!("{key} in {row:?}"));
        let base = strategy(
            get("tensor parallelism"),
            get("data parallelism"),
            get("pipeline parallelism"),
            1,
        );
        let seq_len = get("sequence length");
        let shape = DecoderConfig::gpt(
            get("# layers"),
            get("hidden size"),
            get("attention heads"),
            51_200,
            seq_len,
        );
        Run {
            shape,
            strategy: Strategy {
                global_batch: get("global batch"),
                micro_batch: get("micro batch"),
                seq_len,
                recompute,
                ..base
            },
            cluster,
            software: Software::MEGATRON_2021,
            seconds: decimal(row, "iteration time (ms)").unwrap() / 1e3,
        }
    };
    Some(rows.iter().map(run).collect())
}

/// Names of accelerators: in the CSV file, and in Trainyard.
pub type GpuNames = [(&'static str, &'static str)];

/// The clusters of llm-foundry's published bf16 runs, in the order of the runs, which borrow them.
pub fn llm_foundry_clusters(rows: &[Row], gpus: &GpuNames) -> Vec<Cluster> {
    llm_foundry_rows(rows, gpus)
        .map(|(row, name)| format!("{}x{name}", row["gpus"]).parse().unwrap())
        .collect()
}

fn llm_foundry_rows<'a>(
    rows: &'a [Row],
    gpus: &'a GpuNames,
) -> impl Iterator<Item = (&'a Row, &'static str)> {
    let known = rows.iter().filter(|row| row["note"].contains("amp_bf16"));
    known.filter_map(|row| {
        let found = gpus.iter().find(|(theirs, _)| row["gpu"] == *theirs);
        found.map(|(_, ours)| (row, *ours))
    })
}

/// llm-foundry's published bf16 runs: sharded data parallelism, flash attention, no biases.
pub fn llm_foundry<'a>(rows: &[Row], gpus: &GpuNames, clusters: &'a [Cluster]) -> Vec<Run<'a>> {
    let run = |(row, cluster): (&Row, &'a Cluster)| {
        let get = |key: &str| number(row, key).unwrap_or_else(|| panic!("{key} in {row:?}"));
        let (gpus, seq_len) = (get("gpus"), get("seq"));
        let shape = DecoderConfig {
            has_biases: false,
            attention_bias: false,
            ..DecoderConfig::gpt(
                get("layers"),
                get("hidden"),
                get("heads"),
                get("vocab"),
                seq_len,
            )
        };
        let global_batch = get("global_batch_seqs");
        let tokens_per_second = noted(row, "tps_gpu").unwrap() * gpus as f64;
        Run {
            shape,
            strategy: Strategy {
                global_batch,
                micro_batch: get("micro_batch"),
                seq_len,
                zero_stage: get("zero_stage"),
                recompute: match row["recompute"].as_str() {
                    "full" => Recompute::Full,
                    _ => Recompute::None,
                },
                precision: Precision::MIXED,
                ..strategy(1, gpus, 1, 1)
            },
            cluster,
            software: Software {
                gradient_on_wire: 2,
                ..Software::MODERN
            },
            seconds: (global_batch * seq_len) as f64 / tokens_per_second,
        }
    };
    let rows = llm_foundry_rows(rows, gpus).map(|(row, _)| row);
    rows.zip(clusters).map(run).collect()
}

/// The share of predictions that are at most so much too large or too small, as a factor.
pub fn share_within(errors: &[f64], spread: f64) -> f64 {
    let is_within = |error: &&f64| (1.0 + **error).ln().abs() <= (1.0 + spread).ln();
    errors.iter().filter(is_within).count() as f64 / errors.len().max(1) as f64
}

/// The mean and the maximum of the absolute errors.
pub fn summary(errors: &[f64]) -> (f64, f64) {
    let absolute = errors.iter().map(|e| e.abs());
    let worst = absolute.clone().fold(0.0, f64::max);
    (absolute.sum::<f64>() / errors.len().max(1) as f64, worst)
}

/// The error of every run, predicted with constants fitted without any run of the same key, and the mean per key. The
/// fits also use the runs in `extra`.
pub fn held_out<K: Ord + Clone>(
    runs: &[Run<'_>],
    extra: &[Run<'_>],
    key: impl Fn(&Run<'_>) -> K,
) -> (Vec<f64>, Vec<(K, f64)>) {
    let mut keys: Vec<K> = runs.iter().map(&key).collect();
    keys.sort();
    keys.dedup();
    let mut errors = vec![0.0; runs.len()];
    let mut means = Vec::new();
    for held in keys {
        let others = runs.iter().filter(|run| key(run) != held).cloned();
        let others: Vec<Run<'_>> = others.chain(extra.iter().cloned()).collect();
        let constants = trainyard_plan::fit(&others, &Constants::prior(), &Constants::prior_stds());
        let mut key_errors = Vec::new();
        for (run, error) in runs.iter().zip(&mut errors) {
            if key(run) == held {
                *error = run.error(&constants);
                key_errors.push(*error);
            }
        }
        means.push((held, summary(&key_errors).0));
    }
    (errors, means)
}

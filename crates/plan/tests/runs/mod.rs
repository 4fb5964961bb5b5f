//! Runs that others measured, from files beside the workspace; tests that need them say so and return
//! where they are absent.

#![allow(dead_code)]

use std::collections::HashMap;
use std::path::PathBuf;

use trainyard_plan::{
    Cluster, Constants, Degrees, Layers, Offload, Precision, Recompute, Run, Shape, Software,
    Strategy,
};
use trainyard_schedule::Kind;

/// The rows of a file, by the names in its first line; none where the file is absent.
pub fn rows(file: &str) -> Option<Vec<HashMap<String, String>>> {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../..");
    let path = root.join("shared/data").join(file);
    let Ok(text) = std::fs::read_to_string(&path) else {
        eprintln!("skipped: {} is absent", path.display());
        return None;
    };
    let mut lines = text.trim_start_matches('\u{feff}').lines();
    let names = fields(lines.next()?);
    Some(
        lines
            .map(|line| names.iter().cloned().zip(fields(line)).collect())
            .collect(),
    )
}

/// The fields of a line, some of them in quotes.
fn fields(line: &str) -> Vec<String> {
    let mut fields = vec![String::new()];
    let mut quoted = false;
    for letter in line.chars() {
        match letter {
            '"' => quoted = !quoted,
            ',' if !quoted => fields.push(String::new()),
            other => fields.last_mut().unwrap().push(other),
        }
    }
    fields
}

/// A number of a row, if it says one.
pub fn number(row: &HashMap<String, String>, key: &str) -> Option<usize> {
    row.get(key)?.parse().ok()
}

/// A number with decimals.
pub fn decimal(row: &HashMap<String, String>, key: &str) -> Option<f64> {
    row.get(key)?.parse().ok()
}

/// `key=value` in the note of a row.
pub fn noted(row: &HashMap<String, String>, key: &str) -> Option<f64> {
    let notes = row.get("note")?.split(';');
    let mut found = notes.filter_map(|note| note.strip_prefix(key)?.strip_prefix('='));
    found.next()?.parse().ok()
}

/// Megatron's way in 2021: 16-bit gradients, 20 bytes of states per parameter.
pub const HALF: Precision = Precision {
    compute: 2,
    parameter: 2,
    gradient: 2,
    optimizer: 16,
};

/// Degrees of Megatron: replicas are `dp_replicate` where nothing is sharded, else `dp_shard`.
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
        layers: Layers {
            schedule: match chunks {
                1 => Kind::OneForwardOneBackward,
                _ => Kind::Interleaved,
            },
            stages_per_rank: chunks,
        },
        global_batch: 1,
        micro_batch: 1,
        seq_len: 2048,
        recompute: Recompute::None,
        offload: Offload::None,
        precision: HALF,
    }
}

/// The runs of vTrain (Megatron on A100): on one machine nothing is computed again, on many everything is.
pub fn vtrain<'a>(file: &str, recompute: Recompute, cluster: &'a Cluster) -> Option<Vec<Run<'a>>> {
    let rows = rows(file)?;
    let run = |row: &HashMap<String, String>| {
        let get = |key: &str| number(row, key).unwrap_or_else(|| panic!("{key} in {row:?}"));
        let split = strategy(
            get("tensor parallelism"),
            get("data parallelism"),
            get("pipeline parallelism"),
            1,
        );
        let seq_len = get("sequence length");
        let shape = Shape::gpt(
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
                ..split
            },
            cluster,
            software: Software::MEGATRON_2021,
            seconds: decimal(row, "iteration time (ms)").unwrap() / 1e3,
        }
    };
    Some(rows.iter().map(run).collect())
}

/// Mean and worst of absolute errors.
pub fn summary(errors: &[f64]) -> (f64, f64) {
    let absolute = errors.iter().map(|e| e.abs());
    let worst = absolute.clone().fold(0.0, f64::max);
    (absolute.sum::<f64>() / errors.len().max(1) as f64, worst)
}

/// The errors of every run, predicted by constants fitted without any run of the same key, and the mean
/// of each key.
pub fn held_out<K: Ord + Clone>(
    runs: &[Run<'_>],
    beside: &[Run<'_>],
    key: impl Fn(&Run<'_>) -> K,
) -> (Vec<f64>, Vec<(K, f64)>) {
    let mut keys: Vec<K> = runs.iter().map(&key).collect();
    keys.sort();
    keys.dedup();
    let mut errors = vec![0.0; runs.len()];
    let mut means = Vec::new();
    for held in keys {
        let others = runs.iter().filter(|run| key(run) != held).cloned();
        let others: Vec<Run<'_>> = others.chain(beside.iter().cloned()).collect();
        let constants = trainyard_plan::fit(&others, &Constants::likely(), &Constants::doubts());
        let mut own = Vec::new();
        for (run, error) in runs.iter().zip(&mut errors) {
            if key(run) == held {
                *error = run.error(&constants);
                own.push(*error);
            }
        }
        means.push((held, summary(&own).0));
    }
    (errors, means)
}

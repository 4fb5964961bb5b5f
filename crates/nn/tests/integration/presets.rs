//! The models and the data of the PyTorch baselines, from the same formulas.
#![allow(dead_code, missing_docs, reason = "not every helper is used")]

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use tch::Tensor;
use trainyard_arch::{DecoderConfig, Flavor};
use trainyard_nn::Module;

pub fn tiny() -> DecoderConfig {
    Flavor::Tiny.into()
}

pub fn small() -> DecoderConfig {
    Flavor::Small.into()
}

pub fn llama3_70b() -> DecoderConfig {
    Flavor::Llama3_70b.into()
}

/// Inputs and targets of the first step, both [batch, seq].
pub fn token_batch(batch: i64, seq: i64, vocab: i64, seed: u64) -> (Tensor, Tensor) {
    let tokens: Vec<i64> = (0..batch as u64)
        .flat_map(|row| sequence(row, seq, vocab, seed))
        .collect();
    let tokens = Tensor::from_slice(&tokens).view([batch, seq + 1]);
    let part = |start| tokens.narrow(1, start, seq).contiguous();
    (part(0), part(1))
}

/// Images [batch, 1, 28, 28] and labels [batch] of the first step.
pub fn image_batch(batch: i64, seed: u64) -> (Tensor, Tensor) {
    let (mut pixels, mut labels) = (Vec::new(), Vec::new());
    for row in 0..batch as u64 {
        let mut x = start(row, seed);
        for _ in 0..784 {
            x = advance(x);
            pixels.push(((x >> 40) as f64 * 2f64.powi(-24)) as f32);
        }
        labels.push((advance(x) >> 33) as i64 % 10);
    }
    let images = Tensor::from_slice(&pixels).view([batch, 1, 28, 28]);
    (images, Tensor::from_slice(&labels))
}

fn sequence(row: u64, seq: i64, vocab: i64, seed: u64) -> Vec<i64> {
    let mut x = start(row, seed);
    let mut tokens: Vec<i64> = Vec::new();
    for _ in 0..=seq {
        x = advance(x);
        let random = (x >> 33) as i64;
        tokens.push(match tokens.last() {
            Some(&last) if random % 4 != 0 => (5 * last + 7) % vocab,
            _ => (random >> 2) % vocab,
        });
    }
    tokens
}

fn start(row: u64, seed: u64) -> u64 {
    let mut z = (row + 1)
        .wrapping_mul(0x9E37_79B9_7F4A_7C15)
        .wrapping_add(seed);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

fn advance(x: u64) -> u64 {
    x.wrapping_mul(6_364_136_223_846_793_005)
        .wrapping_add(1_442_695_040_888_963_407)
}

/// The norm of all gradients of `module`.
pub fn gradient_norm(module: &dyn Module) -> f64 {
    let squares = module.parameters().into_iter().map(|parameter| {
        let norm = parameter.tensor().grad().norm().double_value(&[]);
        norm * norm
    });
    squares.sum::<f64>().sqrt()
}

pub fn names(module: &dyn Module) -> Vec<String> {
    let parameters = module.parameters();
    parameters.iter().map(|p| p.name().to_owned()).collect()
}

/// Initial weights of a preset, written by PyTorch, or why PyTorch is not available.
pub fn peer_weights(preset: &str, dir: &Path) -> Result<PathBuf, String> {
    let python = std::env::var_os("TRAINYARD_PYTHON").ok_or("TRAINYARD_PYTHON is not set")?;
    let peers = match std::env::var_os("TRAINYARD_PEERS") {
        Some(peers) => PathBuf::from(peers),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bench/peers"),
    };
    let script = peers.join("peer.py");
    if !script.exists() {
        return Err(format!("{} does not exist", script.display()));
    }
    let file = dir.join("init.safetensors");
    let output = Command::new(&python)
        .arg("-B")
        .arg(&script)
        .args(["--strategy", "single", "--preset", preset])
        .args(["--steps", "1", "--warmup", "0", "--dump-init"])
        .arg(&file)
        .output()
        .map_err(|error| format!("{}: {error}", python.display()))?;
    if file.exists() {
        Ok(file)
    } else {
        Err(String::from_utf8_lossy(&output.stderr).into_owned())
    }
}

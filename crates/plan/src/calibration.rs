//! Calibrations: efficiency constants fitted to runs on known accelerators.

use crate::{Accelerator, AttentionKernel, Cluster, Constants, Generation, Software};

/// How a program runs and its fitted efficiency constants.
#[derive(Clone, Debug, PartialEq)]
pub struct Calibration {
    /// Properties of the program.
    pub software: Software,
    /// The efficiency constants.
    pub constants: Constants,
    /// Mean relative error of predictions on held-out runs.
    pub mean_error: f64,
    /// The factor, minus one, within which 90 % of held-out runs are of the prediction: the range of a step time is as wide.
    pub spread: f64,
    /// The runs that the constants were fitted to.
    pub source: String,
}

/// Fitted together to 1,440 runs on one node and 109 runs on up to 64 nodes, all of Megatron in 16-bit precision:
/// the ground truth published by vTrain (VIA-Research/vTrain f8dda847).
const A100_OF_2021: Constants = Constants {
    matmul: 0.9044,
    matmul_area: 3_241_000.0,
    matmul_depth: 678.4,
    attention: 0.2712,
    flash: 0.5,
    memory: 0.9006,
    softmax: 1.022,
    host_block: 0.001001,
    host_rank: 9.108e-5,
    host_microbatch: 1.993e-4,
    link: 1.0,
    link_latency: 1.412e-4,
    peer: 0.1388,
    network: 0.8124,
    network_latency: 2.199e-5,
    loss: 47.56,
    loss_alone: 107.3,
    optimizer: 1.371,
    optimizer_host: 0.001484,
    data_latency: 4.769e-4,
};

/// The constants of 2021 with those of kernels fitted to 52 runs of three papers: Megatron-LM of 2022, Zero Bubble, and the
/// Megatron-LM that MegaScale is compared with.
const A100_OF_2023: Constants = Constants {
    matmul: 0.9002,
    matmul_area: 2_026_000.0,
    matmul_depth: 325.9,
    attention: 0.2381,
    memory: 1.0,
    softmax: 0.9374,
    loss_alone: 16.89,
    ..A100_OF_2021
};

/// Fitted to 70 bf16 runs published by llm-foundry (scripts/train/benchmarking). These runs use no tensor or
/// pipeline parallelism, so the related constants are priors. Flash attention's efficiency is not taken from them
/// either, because they used an obsolete kernel.
const H100: Constants = Constants {
    matmul: 0.6467,
    matmul_area: 3_000_000.0,
    matmul_depth: 184.8,
    attention: 0.5,
    flash: 0.5,
    memory: 0.8668,
    softmax: 1.3,
    host_block: 9.001e-4,
    host_rank: 1.000e-4,
    host_microbatch: 5.154e-4,
    link: 0.6122,
    link_latency: 2.008e-5,
    peer: 0.3,
    network: 0.8,
    network_latency: 3.003e-5,
    loss: 30.0,
    loss_alone: 27.16,
    optimizer: 1.243,
    optimizer_host: 0.00265,
    data_latency: 3.100e-4,
};

/// Fitted to 59 of llm-foundry's runs on A100 with 40 and 80 GB.
const A100_MODERN: Constants = Constants {
    matmul: 0.8376,
    matmul_area: 564_900.0,
    matmul_depth: 842.0,
    attention: 0.5,
    flash: 0.5,
    memory: 0.7592,
    softmax: 1.3,
    host_block: 9.000e-4,
    host_rank: 1.000e-4,
    host_microbatch: 5.073e-4,
    link: 0.6856,
    link_latency: 2.001e-5,
    peer: 0.3,
    network: 0.8,
    network_latency: 3.000e-5,
    loss: 30.0,
    loss_alone: 26.6,
    optimizer: 1.211,
    optimizer_host: 0.001997,
    data_latency: 2.999e-4,
};

impl Calibration {
    /// The closest calibration for an accelerator: A100s have their own, by whether the program materializes
    /// attention scores; all other accelerators use the H100's.
    pub fn of(accelerator: &Accelerator, software: Software) -> Calibration {
        let is_a100 = accelerator.name.starts_with("A100");
        let is_of_2021 = software.generation == Generation::Of2021;
        let (constants, (mean_error, spread), source) = match (is_a100, software.attention) {
            (true, AttentionKernel::Materialized) if is_of_2021 => {
                let source = "1,549 Megatron runs on A100, vTrain's ground truth";
                (A100_OF_2021, (0.086, 0.23), source)
            }
            (true, AttentionKernel::Materialized) => (
                A100_OF_2023,
                (0.08, 0.33),
                "52 Megatron runs on A100 of three papers of 2022 to 2024",
            ),
            (true, AttentionKernel::Flash) => (
                A100_MODERN,
                (0.10, 0.15),
                "59 runs on A100, llm-foundry's benchmarks",
            ),
            (false, _) => (
                H100,
                (0.10, 0.15),
                "70 runs on H100, llm-foundry's benchmarks",
            ),
        };
        Calibration {
            software,
            constants,
            mean_error,
            spread,
            source: source.to_owned(),
        }
    }

    /// The calibration for a cluster, with the constants from its cluster file.
    pub fn of_cluster(cluster: &Cluster, software: Software) -> Calibration {
        let mut calibration = Calibration::of(&cluster.accelerator, software);
        if cluster.constants.is_empty() {
            return calibration;
        }
        let mut values = calibration.constants.to_array();
        for (name, value) in Constants::names().iter().zip(&mut values) {
            *value = *cluster.constants.get(*name).unwrap_or(value);
        }
        calibration.constants = Constants::from_array(values);
        let names: Vec<&str> = cluster.constants.keys().map(String::as_str).collect();
        let rest = calibration.source;
        calibration.source = format!("the cluster file ({}); otherwise {rest}", names.join(", "));
        calibration
    }

    /// The prior constants, without any measurement.
    pub fn uncalibrated(software: Software) -> Calibration {
        Calibration {
            software,
            constants: Constants::prior(),
            mean_error: 0.25,
            spread: 0.6,
            source: "nothing measured".to_owned(),
        }
    }
}

//! Every strategy on libtorch's CUDA build with simulated CUDA libraries, or on the GPUs of this node.
//!
//! Simulated kernels compute nothing, so these tests say nothing of values: they show that the device path issues
//! kernels, copies and collectives that exist, on the right devices, in an order on which all ranks agree, and that it
//! ends. `TRAINYARD_NODE_GPUS=8` runs all rows for which 8 GPUs are enough without simulation.

use std::error::Error;
use std::path::PathBuf;
use std::process::Command;

use libtest_mimic::{Failed, Trial};
use trainyard_conformance::programs::{find, repository, run};
use trainyard_conformance::{Outcome, as_trials, full_only};

/// A name, the number of ranks, a config, and overrides of its keys.
type Row = (&'static str, usize, &'static str, &'static str);

const TINY: &str = "configs/llama-tiny.toml";
const SHARDED: &str =
    "--parallelism.data_parallel_replicate_degree 1 --parallelism.data_parallel_shard_degree -1";

/// Every strategy once, for every CI run.
const ROWS: [Row; 10] = [
    ("one_gpu", 1, TINY, ""),
    ("ddp", 2, TINY, ""),
    ("zero_1", 2, TINY, "SHARDED --parallelism.zero_stage 1"),
    (
        "zero_3_in_bfloat16_with_recomputation",
        2,
        TINY,
        "SHARDED --training.mixed_precision_param bfloat16 --activation_checkpoint.mode full",
    ),
    ("tensor_parallel", 2, "configs/llama-tiny-tp.toml", ""),
    ("ring_attention", 2, "configs/llama-tiny-cp.toml", ""),
    (
        "ulysses",
        2,
        "configs/llama-tiny-cp.toml",
        "--parallelism.context_parallel_method ulysses",
    ),
    (
        "interleaved_pipeline",
        2,
        TINY,
        "--parallelism.pipeline_parallel_degree 2 --parallelism.pipeline_parallel_schedule Interleaved1F1B \
         --training.local_batch_size 1 --training.global_batch_size 4",
    ),
    ("experts", 2, "configs/tiny_moe.toml", ""),
    (
        "checkpoint",
        2,
        TINY,
        "--checkpoint.enable true --checkpoint.interval 1",
    ),
];

/// Other types, optimizers, schedules and combinations, for full CI runs.
const FULL_ROWS: [Row; 24] = [
    (
        "bfloat16",
        1,
        TINY,
        "--training.mixed_precision_param bfloat16",
    ),
    (
        "float16",
        1,
        TINY,
        "--training.mixed_precision_param float16",
    ),
    ("cnn", 1, "configs/cnn.toml", ""),
    (
        "recomputation",
        1,
        TINY,
        "--activation_checkpoint.mode full",
    ),
    ("foreach", 1, TINY, "--optimizer.implementation foreach"),
    ("lamb", 1, TINY, "--optimizer.name LAMB"),
    ("sgd", 1, TINY, "--optimizer.name SGD"),
    ("offload", 2, TINY, "SHARDED --parallelism.offload cpu"),
    (
        "offload_of_optimizer_states",
        2,
        TINY,
        "SHARDED --parallelism.zero_stage 1 --parallelism.offload cpu --parallelism.offload_states optimizer \
         --training.mixed_precision_param bfloat16",
    ),
    (
        "validation",
        1,
        TINY,
        "--validation.enable true --validation.freq 1 --validation.steps 1",
    ),
    ("ddp", 4, TINY, ""),
    (
        "compressed_gradients",
        2,
        TINY,
        "--parallelism.gradient_compression bf16",
    ),
    (
        "quantized_gradients",
        2,
        TINY,
        "--parallelism.gradient_compression int8",
    ),
    ("top_k", 2, TINY, "--parallelism.gradient_compression top_k"),
    (
        "random_k",
        2,
        TINY,
        "--parallelism.gradient_compression random_k",
    ),
    (
        "power_sgd",
        2,
        TINY,
        "--parallelism.gradient_compression power_sgd --parallelism.power_sgd_start_step 1",
    ),
    (
        "zero_plus_plus",
        4,
        TINY,
        "--parallelism.data_parallel_replicate_degree 2 --parallelism.data_parallel_shard_degree 2 \
         --parallelism.gradient_compression int8 --parallelism.parameter_compression fp8 \
         --parallelism.fsdp_secondary_shards true",
    ),
    (
        "unused_parameters",
        2,
        TINY,
        "--parallelism.find_unused_parameters true",
    ),
    ("zero_2", 2, TINY, "SHARDED --parallelism.zero_stage 2"),
    (
        "hybrid_sharding",
        4,
        TINY,
        "--parallelism.data_parallel_replicate_degree 2 --parallelism.data_parallel_shard_degree 2",
    ),
    (
        "tensor_parallel_and_sharding",
        4,
        "configs/llama-tiny-tp.toml",
        "SHARDED",
    ),
    (
        "pipeline",
        2,
        TINY,
        "--parallelism.pipeline_parallel_degree 2 --training.local_batch_size 1 --training.global_batch_size 4",
    ),
    ("three_axes", 8, "configs/llama-tiny-3d.toml", ""),
    (
        "experts",
        4,
        "configs/tiny_moe.toml",
        "--parallelism.data_parallel_shard_degree 4",
    ),
];

/// The GPUs on which a row runs.
#[derive(Clone, Copy)]
enum Gpus {
    /// Simulated ones of this compute capability.
    Simulated(&'static str),
    /// Those of this node.
    Present,
}

/// The environment variable with the number of GPUs of this node, which are used instead of simulated ones.
const NODE_GPUS: &str = "TRAINYARD_NODE_GPUS";

/// One test for each row.
pub fn trials() -> Vec<Trial> {
    let num_gpus = std::env::var(NODE_GPUS).ok();
    match num_gpus.and_then(|number| number.parse().ok()) {
        Some(num_gpus) => trials_on_node(num_gpus),
        None => trials_on_simulated(),
    }
}

/// All rows for which there are enough GPUs.
fn trials_on_node(num_gpus: usize) -> Vec<Trial> {
    let rows = ROWS.iter().chain(&FULL_ROWS);
    let rows = rows.filter(|row| row.1 <= num_gpus);
    rows.map(|row| trial(row, Gpus::Present)).collect()
}

/// Rows on an A100; in full CI runs, all rows, and on an H100 too.
fn trials_on_simulated() -> Vec<Trial> {
    let on = |arch| move |row: &Row| trial(row, Gpus::Simulated(arch));
    let all = || ROWS.iter().chain(&FULL_ROWS);
    let full = FULL_ROWS.iter().map(on("80")).chain(all().map(on("90")));
    let quick = ROWS.iter().map(on("80"));
    let quick = quick.chain(as_trials("strategy_matrix", &[(DRY_RUN, dry_run)]));
    quick.chain(full.map(full_only)).collect()
}

fn trial(&(name, num_ranks, config, overrides): &Row, gpus: Gpus) -> Trial {
    let arch = match gpus {
        Gpus::Simulated(arch) => format!("_sm_{arch}"),
        Gpus::Present => String::new(),
    };
    let title = format!("strategy_matrix::{name}_on_{num_ranks}_gpus{arch}");
    let test = move || trains(gpus, num_ranks, config, overrides);
    Trial::test(title, move || test().map_err(Failed::from))
}

const DRY_RUN: &str = "a_dry_run_measures_the_allocator";

/// A sharded rank of eight: what the allocator reserves holds what it allocates, which holds the tensors that a dry run
/// counts on meta, up to buffers of Gloo.
fn dry_run() -> Outcome {
    let mut command = Command::new(find("trainyard")?);
    command
        .args(["dry-run", TINY, "--world", "8", "--json"])
        .args(["--allocator", "cuda,expandable"])
        .args(SHARDED.split_whitespace())
        .current_dir(repository("."));
    let found: serde_json::Value = serde_json::from_slice(&run(&mut command)?.stdout)?;
    for settings in ["cuda", "expandable"] {
        let bytes = |name: &str| found["allocators"][settings][name].as_u64();
        let (allocated, reserved) = (bytes("allocated_bytes"), bytes("reserved_bytes"));
        assert!(reserved >= allocated, "{found}");
        let states = &found["states"];
        let states: u64 = ["parameters", "gradients", "optimizer"]
            .iter()
            .filter_map(|kind| states[*kind].as_u64())
            .sum();
        assert!(allocated > Some(states), "{found}");
    }
    Ok(())
}

/// Three steps end without an error.
fn trains(
    gpus: Gpus,
    num_ranks: usize,
    config: &str,
    overrides: &str,
) -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let num_ranks = num_ranks.to_string();
    let trainyard = find("trainyard")?;
    let mut command = Command::new(&trainyard);
    if let Gpus::Simulated(arch) = gpus {
        command
            .args(["simulate", "--gpus", &num_ranks, "--arch", arch, "--"])
            .arg(&trainyard);
    }
    command
        .args(["run", "--standalone", "--nproc-per-node", &num_ranks, "--"])
        .arg(&trainyard)
        .args(["train", config, "--comm.backend", "nccl"])
        .args(["--training.steps", "3", "--lr_scheduler.warmup_steps", "1"])
        .args([
            "--comm.init_timeout_seconds",
            "60",
            "--comm.train_timeout_seconds",
            "60",
        ])
        .arg("--job.dump_folder")
        .arg(folder.path())
        .args(overrides.replace("SHARDED", SHARDED).split_whitespace())
        .current_dir(repository("."));
    run(&mut command)?;
    if overrides.contains("checkpoint.enable") {
        let saved: PathBuf = folder.path().join("checkpoint/step-3");
        assert!(saved.is_dir(), "no checkpoint in {}", saved.display());
    }
    Ok(())
}

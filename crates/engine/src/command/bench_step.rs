//! `bench-step`: trains a preset like the PyTorch programs in `bench/peers` and prints the same JSON line.
//!
//! It uses the trainer of `trainyard train` with their settings; only the loop that measures differs.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use serde::Serialize;
use tch::{Kind, Tensor};
use trainyard_config::Config;
use trainyard_data::{Sampler, step_batches};
use trainyard_mesh::Axis;
use trainyard_torch::{Backend, Group, Rendezvous, World, memory};
use trainyard_trace::{Ledger, Purpose};
use trainyard_train::{Trainer, build, data_axes};

use crate::error::{EngineError, Result};
use crate::measure::{
    ThreadTimes, cpu_seconds, minor_faults, peak_resident_bytes, quantile, resident_bytes,
    thread_times,
};
use crate::ranks::join_mesh;

/// Arguments of `bench-step`, with the names that `bench/peers` uses.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Model and batch size
    #[arg(long, value_parser = ["tiny", "small", "cnn", "tiny_moe", "small_moe"])]
    preset: String,
    /// Parallelism strategy; `bare` is the computation of one rank without communication
    #[arg(
        long,
        value_parser = [
            "single", "bare", "ddp", "zero1", "zero2", "zero3", "fsdp2",
            "tp", "tp_sp", "tp_dp", "tp_fsdp2", "cp_ulysses", "cp_ring",
            "pp_gpipe", "pp_1f1b", "pp_interleaved", "pp_zb_h1", "pp_zb_v", "ep_dp",
        ],
        default_value = "ddp"
    )]
    strategy: String,
    /// Precision
    #[arg(long, value_parser = ["fp32", "bf16"], default_value = "fp32")]
    dtype: String,
    /// Tensor parallel degree, for strategies that combine it with data parallelism
    #[arg(long, default_value_t = 2)]
    tp: usize,
    /// Expert parallel degree; all ranks by default
    #[arg(long)]
    ep: Option<usize>,
    /// Timed steps
    #[arg(long, default_value_t = 20)]
    steps: usize,
    /// Untimed warm-up steps before them
    #[arg(long, default_value_t = 3)]
    warmup: usize,
    /// Micro-batches per step; by default 1, or 4 for pipeline parallelism
    #[arg(long)]
    micro_batches: Option<usize>,
    /// Threads per rank
    #[arg(long, default_value_t = 1)]
    threads: i32,
    /// Seed of weights and data
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Gradient bucket size in megabytes
    #[arg(long, default_value_t = 25.0)]
    bucket_mb: f64,
    /// Reduce gradients after backward instead of overlapping
    #[arg(long)]
    no_overlap: bool,
    /// Send over loopback instead of sharing memory
    #[arg(long)]
    no_shared_memory: bool,
    /// Count allocations (slightly slower)
    #[arg(long)]
    observe_memory: bool,
    /// Print the operator times of one more step
    #[arg(long)]
    operators: bool,
    /// Write a trace of all steps to this directory
    #[arg(long)]
    trace: Option<std::path::PathBuf>,
}

/// The JSON line that `bench/compare` reads.
#[derive(Debug, Serialize)]
struct Line<'a> {
    #[serde(rename = "impl")]
    implementation: &'static str,
    version: &'static str,
    strategy: &'a str,
    preset: &'a str,
    world: usize,
    processes: usize,
    threads: i32,
    dtype: &'a str,
    batch: usize,
    micro_batches: usize,
    warmup: usize,
    steps: usize,
    losses: Vec<f64>,
    grad_norms: Vec<f64>,
    tokens_per_s: f64,
    step_ms_median: f64,
    step_ms_p10: f64,
    cpu_ms_per_step_per_rank: Vec<f64>,
    peak_rss_mb_per_rank: Vec<f64>,
    rss_mb_before_model_per_rank: Vec<f64>,
    comm_bytes_per_step_per_rank: Wire,
    /// The main thread: on a core, and ready to run while others had the cores. It is blocked for the rest of a step.
    main_running_ms_per_step_per_rank: Vec<f64>,
    main_waiting_for_core_ms_per_step_per_rank: Vec<f64>,
    other_threads_ms_per_step_per_rank: Vec<f64>,
    minor_faults_per_step_per_rank: Vec<f64>,
    num_operators: Option<usize>,
    peak_allocated_bytes: Option<u64>,
}

#[derive(Debug, Serialize)]
struct Wire {
    sent: Vec<f64>,
    received: Vec<f64>,
}

impl Arguments {
    fn num_microbatches(&self) -> usize {
        let usual = if self.strategy.starts_with("pp_") {
            4
        } else {
            1
        };
        self.micro_batches.unwrap_or(usual)
    }
}

/// Trains on all ranks; rank 0 prints the JSON line.
pub fn execute(arguments: Arguments) -> Result<ExitCode> {
    tch::set_num_threads(arguments.threads);
    if arguments.observe_memory {
        memory::observe();
    }
    let at = Rendezvous::from_env(Duration::from_secs(300))?;
    let is_bare = arguments.strategy == "bare";
    let mut config = preset(&arguments, at.world_size)?;
    let mesh = config.mesh(at.world_size)?;
    let num_data_ranks = mesh.size_of(data_axes());
    let num_microbatches = arguments.num_microbatches();
    config.training.local_batch_size =
        config.training.global_batch_size.unwrap_or(1) / num_data_ranks / num_microbatches;
    let ledger = match arguments.trace {
        Some(_) => Ledger::recording(at.rank),
        None => Ledger::new(at.rank),
    };
    let mut world = join_mesh(mesh, Backend::auto(), &at, |_| ledger)?;
    if arguments.no_shared_memory {
        world = world.without_shared_memory();
    }
    let world_group = world.world_group()?;
    let rss_before = resident_bytes();

    let sampler = Sampler::new(
        config.training.global_batch_size.unwrap_or(1),
        num_data_ranks,
        num_microbatches,
    )?;
    let source = build::source(&(&config).into(), build::Phase::Training)?;
    let data_rank = world.group(data_axes())?.index();
    let num_steps = arguments.warmup + arguments.steps;
    let batches = (0..num_steps)
        .map(|step| step_batches(&*source, &sampler, step as u64, data_rank, world.device()))
        .collect::<Result<Vec<_>, _>>()?;
    let alone = World::single_rank(Ledger::new(at.rank))?;
    if is_bare {
        config.training.global_batch_size =
            config.training.global_batch_size.map(|b| b / at.world_size);
    }
    let trained_in = if is_bare { &alone } else { &world };
    let mut trainer = Trainer::new(&(&config).into(), trained_in, world.device().into())?;

    let mut measured = Measured::default();
    for (step, microbatches) in batches.iter().enumerate() {
        if step == arguments.warmup {
            world_group.barrier()?.wait()?;
            measured.begin(&world);
        }
        let start = Instant::now();
        let outcome = trainer.step(microbatches)?;
        measured.losses.push(f64::try_from(&outcome.local_loss)?);
        measured.norms.push(f64::try_from(&outcome.grad_norm)?);
        measured.seconds.push(start.elapsed().as_secs_f64());
    }
    let per_step = |after: f64, before: f64| (after - before) / arguments.steps as f64;
    let ms_per_step = |after: f64, before: f64| 1e3 * per_step(after, before);
    let (faults, cpu, threads) = (minor_faults(), cpu_seconds(), thread_times());
    world_group.barrier()?.wait()?;
    let wire = world.wire_bytes();
    let before = &measured.threads_before;
    let mine = [
        ms_per_step(cpu, measured.cpu_before),
        peak_resident_bytes() as f64 / f64::from(1 << 20),
        rss_before as f64 / f64::from(1 << 20),
        per_step(wire.sent as f64, measured.wire_before.sent as f64),
        per_step(wire.received as f64, measured.wire_before.received as f64),
        ms_per_step(threads.main_running, before.main_running),
        ms_per_step(threads.main_waiting_for_core, before.main_waiting_for_core),
        ms_per_step(threads.others_running, before.others_running),
        per_step(faults, measured.faults_before),
    ];
    let facts = gather(&world_group, &mine)?;
    let losses = gather(&world_group, &measured.losses)?;
    let times = gather(&world_group, &measured.seconds[arguments.warmup..])?;
    let mut num_operators = None;
    if arguments.operators {
        let (stepped, operators) = trainyard_torch::operators::record(|| {
            trainer.step(batches.last().map_or(&[], Vec::as_slice))
        })?;
        stepped?;
        num_operators = Some(operators.len());
        if at.rank == 0 {
            print_operators(&operators);
        }
    }
    if let Some(folder) = &arguments.trace {
        write_trace(folder, &world)?;
    }
    if at.rank != 0 {
        return Ok(ExitCode::SUCCESS);
    }

    // Ranks that communicate are as fast as the slowest one; `bare` ranks do not wait for each other.
    let step_ms: Vec<f64> = (0..arguments.steps)
        .map(|step| {
            let of_ranks = times.iter().map(|t| 1e3 * t[step]);
            if is_bare {
                of_ranks.sum::<f64>() / times.len() as f64
            } else {
                of_ranks.fold(0.0, f64::max)
            }
        })
        .collect();
    let median = quantile(&step_ms, 0.5);
    let column = |index: usize| facts.iter().map(|f| f[index]).collect::<Vec<f64>>();
    let global_batch = sampler.global_batch() as usize;
    let samples = match arguments.preset.as_str() {
        "cnn" => global_batch,
        _ => global_batch * config.training.seq_len,
    };
    // The ranks of a tensor parallel group have the same loss.
    let num_copies = world.mesh().size(Axis::Tp) as f64;
    let line = Line {
        implementation: "trainyard",
        version: env!("CARGO_PKG_VERSION"),
        strategy: &arguments.strategy,
        preset: &arguments.preset,
        world: at.world_size,
        processes: at.world_size,
        threads: arguments.threads,
        dtype: &arguments.dtype,
        batch: global_batch,
        micro_batches: num_microbatches,
        warmup: arguments.warmup,
        steps: arguments.steps,
        losses: (0..num_steps)
            .map(|s| losses.iter().map(|l| l[s]).sum::<f64>() / num_copies)
            .collect(),
        grad_norms: measured.norms,
        tokens_per_s: samples as f64 / median * 1e3,
        step_ms_median: median,
        step_ms_p10: quantile(&step_ms, 0.1),
        cpu_ms_per_step_per_rank: column(0),
        peak_rss_mb_per_rank: column(1),
        rss_mb_before_model_per_rank: column(2),
        comm_bytes_per_step_per_rank: Wire {
            sent: column(3),
            received: column(4),
        },
        main_running_ms_per_step_per_rank: column(5),
        main_waiting_for_core_ms_per_step_per_rank: column(6),
        other_threads_ms_per_step_per_rank: column(7),
        minor_faults_per_step_per_rank: column(8),
        num_operators,
        peak_allocated_bytes: if arguments.observe_memory {
            Some(memory::report()?.peak)
        } else {
            None
        },
    };
    println!("{}", serde_json::to_string(&line).unwrap_or_default());
    Ok(ExitCode::SUCCESS)
}

/// Measurements of this rank.
#[derive(Default)]
struct Measured {
    losses: Vec<f64>,
    norms: Vec<f64>,
    seconds: Vec<f64>,
    cpu_before: f64,
    threads_before: ThreadTimes,
    faults_before: f64,
    wire_before: trainyard_torch::WireBytes,
}

impl Measured {
    fn begin(&mut self, world: &World) {
        self.cpu_before = cpu_seconds();
        self.threads_before = thread_times();
        self.faults_before = minor_faults();
        self.wire_before = world.wire_bytes();
        memory::reset_peak();
    }
}

/// The config of a preset, with the settings of `bench/peers`.
fn preset(arguments: &Arguments, world_size: usize) -> Result<Config> {
    let (flavor, moe) = match arguments.preset.split_once('_') {
        Some((flavor, _)) => (flavor, mixture(&arguments.preset)),
        None => (arguments.preset.as_str(), ""),
    };
    let model = match flavor {
        "cnn" => "name = \"cnn\"".to_owned(),
        _ => format!("name = \"llama\"\nflavor = \"{flavor}\"\n{moe}"),
    };
    let (batch, seq_len) = match flavor {
        "cnn" => (64, 1),
        "tiny" => (8, 128),
        _ => (8, 256),
    };
    let precision = match arguments.dtype.as_str() {
        "bf16" => "mixed_precision_param = \"bfloat16\"\nmixed_precision_reduce = \"float32\"",
        _ => "",
    };
    let sharding = strategy_keys(arguments, world_size);
    let text = format!(
        "[model]\n{model}\n[training]\nlocal_batch_size = 1\nglobal_batch_size = {batch}\n\
         seq_len = {seq_len}\nmax_norm = 1.0\nsteps = {}\n{precision}\n\
         [parallelism]\n{sharding}\nbucket_cap_mb = {:?}\noverlap = {}\n\
         [optimizer]\nlr = 3e-4\nbeta1 = 0.9\nbeta2 = 0.95\neps = 1e-8\nweight_decay = 0.1\n\
         [debug]\nseed = {}\n",
        arguments.warmup + arguments.steps,
        arguments.bucket_mb,
        !arguments.no_overlap,
        arguments.seed,
    );
    Ok(Config::parse(&text, &[])?)
}

/// The section `[model.moe]` of the config file with the name of the preset.
fn mixture(preset: &str) -> &'static str {
    let text = match preset {
        "tiny_moe" => include_str!("../../../../configs/tiny_moe.toml"),
        _ => include_str!("../../../../configs/small_moe.toml"),
    };
    let mut sections = text.split("\n\n");
    let found = sections.find(|section| section.starts_with("[model.moe]"));
    found.unwrap_or_default()
}

/// The keys of `[parallelism]` for a strategy.
fn strategy_keys(arguments: &Arguments, world_size: usize) -> String {
    const SHARDED: &str = "data_parallel_shard_degree = -1";
    let tp = arguments.tp;
    let tensor = |degree: usize, sequence: bool| {
        format!("tensor_parallel_degree = {degree}\nenable_sequence_parallel = {sequence}")
    };
    let context = |method: &str| {
        format!("context_parallel_degree = {world_size}\ncontext_parallel_method = \"{method}\"")
    };
    let pipeline = |order: &str| {
        format!("pipeline_parallel_degree = {world_size}\npipeline_parallel_schedule = \"{order}\"")
    };
    match arguments.strategy.as_str() {
        "ep_dp" => {
            let ep = arguments.ep.unwrap_or(world_size);
            format!("{SHARDED}\nzero_stage = 0\nexpert_parallel_degree = {ep}")
        }
        "zero1" => format!("{SHARDED}\nzero_stage = 1"),
        "zero2" => format!("{SHARDED}\nzero_stage = 2"),
        "zero3" | "fsdp2" => SHARDED.to_owned(),
        "tp" => tensor(world_size, false),
        "tp_sp" => tensor(world_size, true),
        "tp_dp" => tensor(tp, true),
        "tp_fsdp2" => format!("{SHARDED}\n{}", tensor(tp, true)),
        "pp_gpipe" => pipeline("gpipe"),
        "pp_1f1b" => pipeline("1f1b"),
        "pp_interleaved" => pipeline("interleaved"),
        "pp_zb_h1" => pipeline("zb-h1"),
        "pp_zb_v" => pipeline("zb-v"),
        "cp_ulysses" => context("ulysses"),
        "cp_ring" => context("ring"),
        _ => String::new(),
    }
}

/// All-gathers the values of every rank.
fn gather(group: &Group, values: &[f64]) -> Result<Vec<Vec<f64>>> {
    let mine = Tensor::from_slice(values);
    let length = values.len() as i64;
    let all = Tensor::zeros(
        [group.size() as i64 * length],
        (Kind::Double, tch::Device::Cpu),
    );
    group.all_gather(&all, &mine, Purpose::Control)?.wait()?;
    let flat = Vec::<f64>::try_from(&all)?;
    Ok(flat
        .chunks(values.len().max(1))
        .map(<[f64]>::to_vec)
        .collect())
}

fn print_operators(operators: &[trainyard_trace::Operator]) {
    let times = trainyard_trace::self_times(operators);
    let total: u64 = times.iter().map(|(_, time)| time.self_ns).sum();
    for (name, time) in times.iter().take(30) {
        let share = 100.0 * time.self_ns as f64 / total.max(1) as f64;
        let ms = time.self_ns as f64 / 1e6;
        eprintln!("{name:<55} {:>6} x {ms:>9.2} ms {share:>5.1} %", time.count);
    }
}

fn write_trace(folder: &std::path::Path, world: &World) -> Result<()> {
    let io = |source| EngineError::Io {
        path: folder.to_owned(),
        source,
    };
    std::fs::create_dir_all(folder).map_err(io)?;
    let path = folder.join(trainyard_trace::chrome_file_name(world.rank()));
    world
        .ledger()
        .write_chrome(&path)
        .map_err(|e| EngineError::Unreadable {
            what: path.display().to_string(),
            reason: e.to_string(),
        })
}

//! Published runs as strategies: each paper's table, its model, its cluster, and what the paper leaves open.

use trainyard_arch::{DecoderConfig, Flavor};
use trainyard_plan::{
    Calibration, Cluster, Overheads, PipelineLayout, Precision, Recompute, Run, Software, Strategy,
    Time, memory, model_flops, peak, time,
};
use trainyard_schedule::ScheduleKind;

use crate::runs::{HALF, Row, decimal, need, noted, number, published, strategy};

const GIB: f64 = 1024.0 * 1024.0 * 1024.0;

/// A published run.
pub struct Published {
    pub paper: &'static str,
    pub name: String,
    pub shape: DecoderConfig,
    pub strategy: Strategy,
    pub cluster: Cluster,
    pub software: Software,
    pub seconds: f64,
    /// The memory that the paper reports, in bytes.
    pub bytes: Option<f64>,
}

impl Published {
    /// The paper as [`fit`](trainyard_plan::fit) takes it.
    pub fn run(&self) -> Run<'_> {
        Run {
            shape: self.shape.clone(),
            strategy: self.strategy.clone(),
            cluster: &self.cluster,
            software: self.software,
            seconds: self.seconds,
        }
    }

    /// The prediction with the planner's own constants.
    pub fn predicted(&self) -> Time {
        let calibration = Calibration::of(&self.cluster.accelerator, self.software);
        time(&self.shape, &self.strategy, &self.cluster, &calibration)
    }
}

/// The measured step time, from the FLOPs of a step and the published FLOP/s per GPU.
fn seconds(row: &Row, flops: f64) -> f64 {
    let each = decimal(row, "tflops_per_gpu").unwrap() * 1e12;
    flops / (need(row, "gpus") as f64 * each)
}

/// Narayanan et al. 2021, table 1: 32 to 3072 A100. Their FLOP formula counts the forward pass twice, because of full
/// recomputation.
pub fn megatron_2021() -> Vec<Published> {
    let run = |row: &Row| {
        let get = |key| need(row, key);
        let (tp, pp, gpus) = (get("tp"), get("pp"), get("gpus"));
        let (layers, hidden) = (get("layers"), get("hidden"));
        let strategy = Strategy {
            global_batch: get("global_batch_seqs"),
            micro_batch: get("micro_batch"),
            recompute: Recompute::Full,
            ..strategy(tp, gpus / tp / pp, pp, get("vpp"))
        };
        let (l, h, s) = (layers as f64, hidden as f64, 2048.0);
        let tokens = strategy.global_batch as f64 * s;
        let flops = 96.0 * tokens * l * h * h * (1.0 + s / (6.0 * h) + 51_200.0 / (16.0 * l * h));
        Published {
            paper: "megatron-2021",
            name: row["model"].clone(),
            shape: DecoderConfig::gpt(layers, hidden, get("heads"), 51_200, 2048),
            strategy,
            cluster: format!("{gpus}xA100").parse().unwrap(),
            software: Software::MEGATRON_2021,
            seconds: seconds(row, flops),
            bytes: None,
        }
    };
    published("megatron-2021").iter().map(run).collect()
}

/// Korthikanti et al., table 5.
pub fn megatron_2022() -> Vec<Published> {
    let rows = published("megatron-2022");
    let run = |row| {
        let get = |key| need(row, key);
        let is_selective = row["recompute"] == "selective";
        let recompute = if is_selective {
            Recompute::Selective
        } else {
            Recompute::Full
        };
        Published {
            paper: "megatron-2022",
            name: format!("{}, {}", row["model"], row["recompute"]),
            shape: DecoderConfig::gpt(get("layers"), get("hidden"), get("heads"), 51_200, 2048),
            strategy: Strategy {
                global_batch: get("global_batch_seqs"),
                micro_batch: get("micro_batch"),
                sequence_parallel: is_selective,
                recompute,
                ..strategy(get("tp"), 1, get("pp"), get("vpp"))
            },
            cluster: format!("{}xA100", get("gpus")).parse().unwrap(),
            software: Software::MEGATRON_2023,
            seconds: noted(row, "iter_s").unwrap(),
            bytes: None,
        }
    };
    rows.iter().map(run).collect()
}

/// Qi et al., tables 3 to 5: the schedules that Trainyard has.
pub fn zero_bubble() -> Vec<Published> {
    let rows = published("zero-bubble-2023");
    let run = |row: &Row| {
        let get = |key| need(row, key);
        let (pp, layers) = (get("pp"), get("layers"));
        let (schedule, chunks) = match row["note"].split(';').next()? {
            "schedule=1F1B" => (ScheduleKind::OneForwardOneBackward, 1),
            "schedule=ZB-1p" => (ScheduleKind::ZeroBubbleH1, 1),
            "schedule=1F1B-I" => (ScheduleKind::Interleaved, (layers + 2) / pp),
            _ => return None,
        };
        let global_batch = get("global_batch_seqs");
        let per_second = noted(row, "samples_per_gpu_s")? * get("gpus") as f64;
        Some(Published {
            paper: "zero-bubble-2023",
            name: format!("{} {schedule} B{global_batch}", row["model"]),
            shape: DecoderConfig::gpt(layers, get("hidden"), get("heads"), 51_200, 1024),
            strategy: Strategy {
                pipeline: PipelineLayout {
                    schedule,
                    stages_per_rank: chunks,
                },
                global_batch,
                micro_batch: get("micro_batch"),
                seq_len: 1024,
                precision: Precision::BF16,
                ..strategy(1, 1, pp, 1)
            },
            cluster: format!("{}xA100", get("gpus")).parse().unwrap(),
            software: Software::MEGATRON_2023,
            seconds: global_batch as f64 / per_second,
            bytes: Some(noted(row, "mem_gb")? * 1e9),
        })
    };
    rows.iter().filter_map(run).collect()
}

/// Jiang et al., tables 1 and 2: Megatron-LM with 175 B parameters on up to 12,288 GPUs.
pub fn megascale() -> Vec<Published> {
    let rows = published("megascale-2024");
    let run = |row: &Row| {
        let get = |key| need(row, key);
        let gpus = get("gpus");
        let (tp, pp) = (get("tp"), get("pp"));
        Some(Published {
            paper: "megascale-2024",
            name: format!("{} on {gpus}", row["model"]),
            shape: DecoderConfig::gpt(get("layers"), get("hidden"), get("heads"), 64_000, 2048),
            strategy: Strategy {
                global_batch: get("global_batch_seqs"),
                micro_batch: 1,
                sequence_parallel: true,
                recompute: Recompute::Selective,
                zero_stage: 1,
                precision: Precision::BF16,
                ..strategy(tp, gpus / tp / pp, pp, get("vpp"))
            },
            cluster: format!("{gpus}xA100").parse().unwrap(),
            // The paper says of its own system alone that it has flash attention.
            software: Software {
                overlaps_data: true,
                ..Software::MEGATRON_2023
            },
            seconds: noted(row, "iter_s")?,
            bytes: None,
        })
    };
    rows.iter().filter_map(run).collect()
}

/// Megatron Core r0.8 on 48 to 6144 H100. Micro-batch size, stages per rank and recomputation are not published: the
/// fastest combination that fits is assumed, because published runs are tuned.
pub fn megatron_core() -> Vec<Published> {
    let run = |row: &Row| {
        let get = |key| need(row, key);
        let shape = DecoderConfig {
            tie_word_embeddings: false,
            ..DecoderConfig::gpt(get("layers"), get("hidden"), get("heads"), 131_072, 4096)
        };
        let cluster: Cluster = format!("{}xH100", get("gpus")).parse().unwrap();
        let calibration = Calibration::of(&cluster.accelerator, Software::MEGATRON_CORE);
        let fastest = tunable_strategies(row, &shape)
            .into_iter()
            .filter(|strategy| fits(&shape, strategy, &calibration.software, &cluster))
            .map(|strategy| (time(&shape, &strategy, &cluster, &calibration), strategy))
            .min_by(|a, b| a.0.likely.total_cmp(&b.0.likely));
        let (_, strategy) = fastest.expect("some combination must fit");
        let (b, v) = (strategy.micro_batch, strategy.pipeline.stages_per_rank);
        Published {
            paper: "megatron-core-2024",
            name: format!("{} (b{b} v{v} {:?})", row["model"], strategy.recompute),
            seconds: seconds(row, model_flops(&shape, &strategy)),
            shape,
            strategy,
            cluster,
            software: Software::MEGATRON_CORE,
            bytes: None,
        }
    };
    published("megatron-core-2024").iter().map(run).collect()
}

/// The combinations of micro-batch size, stages per rank and recomputation that the authors may have used.
fn tunable_strategies(row: &Row, shape: &DecoderConfig) -> Vec<Strategy> {
    let get = |key| need(row, key);
    let (tp, pp, dp) = (get("tp"), get("pp"), get("dp"));
    let most = if pp > 1 {
        shape.num_hidden_layers / pp
    } else {
        1
    };
    let mut found = Vec::new();
    for micro_batch in [1, 2, 4] {
        for chunks in (1..=most).filter(|v| most.is_multiple_of(*v)) {
            for recompute in [Recompute::None, Recompute::Selective, Recompute::Full] {
                let strategy = Strategy {
                    global_batch: get("global_batch_seqs"),
                    micro_batch,
                    seq_len: 4096,
                    zero_stage: 1,
                    sequence_parallel: tp > 1,
                    recompute,
                    precision: Precision::BF16,
                    ..strategy(tp, dp, pp, chunks)
                };
                let m = strategy.num_microbatches();
                let is_divisible = m * dp * micro_batch == strategy.global_batch;
                if is_divisible && (chunks == 1 || m.is_multiple_of(pp)) {
                    found.push(strategy);
                }
            }
        }
    }
    found
}

fn fits(
    shape: &DecoderConfig,
    strategy: &Strategy,
    software: &Software,
    cluster: &Cluster,
) -> bool {
    let all = memory(shape, strategy, software, &Overheads::default());
    peak(&all).is_some_and(|most| most.total() <= cluster.accelerator.memory.value)
}

/// "The Llama 3 Herd of Models", table 4: 405B on 8192 and 16384 H100, one block per stage, gradients reduced in 32
/// bits, no recomputation. The FLOP count leaves out the masked half of attention, which the paper does not state.
pub fn llama3() -> Vec<Published> {
    let shape = DecoderConfig::from(Flavor::Llama3_405b);
    let run = |row: &Row| {
        let get = |key| need(row, key);
        let (dp, seq_len) = (get("dp"), get("seq"));
        let mut strategy = Strategy {
            global_batch: noted(row, "batch_per_dp").unwrap() as usize * dp,
            seq_len,
            zero_stage: 1,
            sequence_parallel: true,
            precision: Precision::BF16,
            ..strategy(get("tp"), dp, get("pp"), 8)
        };
        strategy.degrees.cp = get("cp");
        let tokens = (strategy.global_batch * seq_len) as f64;
        let attention = (shape.num_hidden_layers * shape.hidden_size * seq_len) as f64;
        let flops = 6.0 * tokens * (shape.num_parameters() as f64 + attention);
        Published {
            paper: "llama3-2024",
            name: format!("{} x {seq_len}, cp {}", row["gpus"], strategy.degrees.cp),
            shape: shape.clone(),
            strategy,
            cluster: format!("{}xH100", get("gpus")).parse().unwrap(),
            software: Software::MODERN,
            seconds: seconds(row, flops),
            bytes: None,
        }
    };
    published("llama3-2024").iter().map(run).collect()
}

/// A trial run for BLOOM: it was published whether it ran out of memory or not.
pub struct Trial {
    pub run: Published,
    /// Whether gradients were accumulated in 32 bits.
    pub is_bf16: bool,
    pub ran_out: bool,
}

/// BigScience's trials on Jean Zay. Without a time, `seconds` is not a number.
pub fn bloom() -> Vec<Trial> {
    published("bloom-2022").iter().map(trial).collect()
}

fn trial(row: &Row) -> Trial {
    let get = |key| need(row, key);
    let is_bf16 = row["note"].contains("bf16_fp32grad");
    let (tp, pp, dp) = (get("tp"), get("pp"), get("dp"));
    let (micro_batch, global_batch) = (get("micro_batch"), get("global_batch_seqs"));
    // Gradients exist in 16 bits; runs that accumulate in 32 bits hold a second copy.
    let gradient = if is_bf16 { 6 } else { 2 };
    let run = Published {
        paper: "bloom-2022",
        name: format!(
            "{} h{} a{} B{global_batch} b{micro_batch} tp{tp} pp{pp} dp{dp}",
            row["model"], row["hidden"], row["heads"]
        ),
        shape: DecoderConfig::gpt(get("layers"), get("hidden"), get("heads"), 250_880, 2048),
        strategy: Strategy {
            global_batch,
            micro_batch,
            recompute: Recompute::Full,
            zero_stage: number(row, "zero_stage").unwrap_or(1),
            precision: Precision {
                gradient,
                reduced: gradient,
                optimizer: 12,
                ..HALF
            },
            ..strategy(tp, dp, pp, 1)
        },
        cluster: jean_zay(),
        software: Software::MEGATRON_2021,
        seconds: noted(row, "iter_s").unwrap_or(f64::NAN),
        bytes: noted(row, "mem_gb").map(|gib| gib * GIB),
    };
    Trial {
        run,
        is_bf16,
        ran_out: row["note"].starts_with("OOM"),
    }
}

/// Jean Zay as the BLOOM paper describes it: nodes of eight A100 with four NVLinks each, and four NICs of 100 Gb/s.
fn jean_zay() -> Cluster {
    let text = "nodes = 48\ngpu = 'A100'\nlink_gb_s = 100\nnics_per_node = 4\nnic_gbit_s = 100\n";
    Cluster::from_toml(text).unwrap()
}

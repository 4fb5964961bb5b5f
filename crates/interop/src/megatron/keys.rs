//! The other flags: optimizer, types, data, checkpoints, logging, and those without a counterpart.

use super::super::{FrameworkError, Outcome};
use super::flags::Flags;

/// Flags that set one key to their value.
const SAME: [(&str, &str); 8] = [
    ("--weight-decay", "optimizer.weight_decay"),
    ("--adam-beta1", "optimizer.beta1"),
    ("--adam-beta2", "optimizer.beta2"),
    ("--adam-eps", "optimizer.eps"),
    ("--sgd-momentum", "optimizer.momentum"),
    ("--clip-grad", "training.max_norm"),
    ("--seed", "debug.seed"),
    ("--save-interval", "checkpoint.interval"),
];

/// Flags that change neither the result nor what is trained, by their beginnings.
const WITHOUT_EFFECT: [(&str, &str); 41] = [
    (
        "--log-",
        "the log has loss, gradient norm, memory and throughput",
    ),
    ("--timing-", "profiling.enable_profiling writes a trace"),
    (
        "--tensorboard-",
        "TensorBoard files are in metrics.save_tb_folder",
    ),
    (
        "--wandb-",
        "metrics go to the log, metrics.enable_tensorboard and metrics.enable_jsonl",
    ),
    ("--profile", "profiling.enable_profiling writes a trace"),
    (
        "--use-mcore-models",
        "there is one implementation of models",
    ),
    (
        "--transformer-impl",
        "there is one implementation of models",
    ),
    ("--use-flash-attn", "it changes speed only"),
    ("--attention-backend", "it changes speed only"),
    (
        "--attention-softmax-in-fp32",
        "softmax is computed in float32",
    ),
    (
        "--accumulate-allreduce-grads-in-fp32",
        "gradients are reduced in training.dtype, float32",
    ),
    ("--overlap-", "it changes speed only"),
    ("--no-async-", "it changes speed only"),
    ("--no-bias-", "it changes speed only"),
    ("--no-gradient-accumulation-fusion", "it changes speed only"),
    ("--no-masked-softmax-fusion", "it changes speed only"),
    ("--no-persist-layer-norm", "it changes speed only"),
    ("--no-rope-fusion", "it changes speed only"),
    ("--no-align-", "it changes speed only"),
    (
        "--no-create-attention-mask-in-dataloader",
        "masks are never data",
    ),
    ("--no-mmap-bin-files", "it changes speed only"),
    ("--no-save-", "checkpoints are complete"),
    ("--no-load-", "checkpoints are complete"),
    (
        "--ckpt-",
        "checkpoints are sharded and load on any number of ranks",
    ),
    (
        "--dist-ckpt-",
        "checkpoints are sharded and load on any number of ranks",
    ),
    (
        "--use-dist-ckpt",
        "checkpoints are sharded and load on any number of ranks",
    ),
    (
        "--eval-",
        "validation.enable evaluates on data of validation.dataset_path",
    ),
    ("--split", "`trainyard data prepare` makes the parts"),
    (
        "--tokenizer-",
        "`trainyard data prepare` takes the tokenizer",
    ),
    (
        "--vocab-file",
        "`trainyard data prepare` takes the tokenizer",
    ),
    (
        "--merge-file",
        "`trainyard data prepare` takes the tokenizer",
    ),
    ("--data-cache-path", "token files need no cache"),
    ("--num-workers", "Trainyard loads ahead by itself"),
    ("--dataloader-type", "samples are shuffled by the seed"),
    (
        "--distributed-backend",
        "comm.backend is chosen by the hardware",
    ),
    ("--local-rank", "`trainyard run` starts the ranks"),
    (
        "--ddp-",
        "it changes speed only; parallelism.bucket_cap_mb is the size of buckets",
    ),
    ("--manual-gc", "there is no garbage collector"),
    ("--exit-", "SIGTERM saves a checkpoint and ends a job"),
    ("--recompute-", "part of --recompute-granularity"),
    (
        "--expert-tensor-parallel-size",
        "experts are not split over tp",
    ),
];

/// Flags of the dispatch of tokens to experts, which change speed only.
const DISPATCH: [&str; 7] = [
    "--moe-token-dispatcher-type",
    "--moe-grouped-gemm",
    "--moe-permute-fusion",
    "--moe-router-fusion",
    "--moe-enable-deepep",
    "--moe-per-layer-logging",
    "--moe-shared-expert-overlap",
];

pub(super) fn outcome(flags: &Flags, flag: &str, value: &str) -> Result<Outcome, FrameworkError> {
    if let Some((_, key)) = SAME.iter().find(|(known, _)| *known == flag) {
        return Ok(Outcome::set(key, value));
    }
    let set = |key: &str, value: &str| Outcome::set(key, value);
    Ok(match flag {
        "--optimizer" => match value {
            "adam" => set("optimizer.name", "AdamW"),
            "sgd" => set("optimizer.name", "SGD"),
            _ => Outcome::rejected("Trainyard has no such optimizer", "use adam or sgd"),
        },
        "--bf16" => types("bfloat16"),
        "--fp16" => types("float16"),
        "--grad-reduce-in-bf16" => set("training.mixed_precision_reduce", "bfloat16"),
        "--loss-scale" => Outcome::rejected("the loss scale is always dynamic", "remove it"),
        "--initial-loss-scale" | "--loss-scale-window" | "--min-loss-scale" | "--hysteresis" => {
            Outcome::ignored("the loss scale starts at 2^16 and adapts")
        }
        "--mock-data" => set("training.dataset", "synthetic"),
        "--data-path" | "--train-data-path" | "--data-args-path" => {
            set("training.dataset", "tokens").with_note(
                "Megatron's token files are not read: prepare the text with `trainyard data prepare`, and give the \
                 folder as --training.dataset_path",
            )
        }
        "--log-interval" => set("metrics.log_freq", value),
        "--tensorboard-dir" => set("metrics.enable_tensorboard", "true"),
        "--distributed-timeout-minutes" => {
            let minutes = flags.degree(flag)?;
            Outcome::set("comm.train_timeout_seconds", minutes.saturating_mul(60))
        }
        "--save" => save(value),
        "--load" if flags.get("--save").as_deref() == Some(value) => {
            Outcome::left("a job resumes from its own folder")
        }
        "--load" | "--pretrained-checkpoint" => Outcome::rejected(
            "Megatron's checkpoints are not read",
            "convert the weights to Hugging Face's format, and give model.hf_assets_path and model.initial_weights",
        ),
        "--async-save" => set("checkpoint.async_mode", "async"),
        "--moe-router-load-balancing-type" => match value {
            "aux_loss" | "seq_aux_loss" => Outcome::left("the loss is computed per sequence"),
            "none" => Outcome::left("no loss without --moe-aux-loss-coeff"),
            _ => Outcome::rejected(
                "Trainyard has no such balancing",
                "use aux_loss, seq_aux_loss or none",
            ),
        },
        flag if DISPATCH.contains(&flag) => Outcome::ignored("it changes speed only"),
        flag => by_beginning(flag),
    })
}

fn types(compute: &str) -> Outcome {
    Outcome::set_all([
        ("training.dtype", "float32".to_owned()),
        ("training.mixed_precision_param", compute.to_owned()),
    ])
}

fn save(folder: &str) -> Outcome {
    if folder.contains(['$', '`']) {
        return Outcome::ignored(
            "the folder is not readable: pass --checkpoint.enable true --checkpoint.folder FOLDER",
        );
    }
    Outcome::set_all([
        ("checkpoint.enable", "true".to_owned()),
        ("checkpoint.folder", folder.to_owned()),
    ])
}

fn by_beginning(flag: &str) -> Outcome {
    let row = WITHOUT_EFFECT
        .iter()
        .find(|(start, _)| flag.starts_with(start));
    match row {
        Some((_, reason)) => Outcome::ignored(*reason),
        None => Outcome::rejected("Trainyard has nothing like it", "remove it"),
    }
}

//! Unsupported settings are rejected, with the reason and an alternative.

use super::*;

fn unsupported(framework: Framework, text: &str) -> String {
    framework.read(text).unwrap_err().to_string()
}

#[test]
fn unsupported_settings_are_rejected_with_the_nearest_alternative() {
    let megatron = "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 \
                    --num-attention-heads 32 --max-position-embeddings 4096 --padded-vocab-size 32000 \
                    --micro-batch-size 1 --seq-length 4096 ";
    for (flags, why, nearest) in [
        (
            "--global-batch-size 12 --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2",
            "divisible by the 4 ranks",
            "8 micro-batches",
        ),
        ("--optimizer-cpu-offload", "states only", "remove"),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 4",
            "every block",
            "uniform",
        ),
        (
            "--num-experts 8 --moe-ffn-hidden-size 64 --tensor-model-parallel-size 2",
            "unsplit experts",
            "--expert-tensor-parallel-size 1",
        ),
        ("--context-parallel-size 3", "do not divide", "multiple"),
        (
            "--tensor-model-parallel-sise 2",
            "does not recognize",
            "--tensor-model-parallel-size",
        ),
        (
            "--micro-batch-size $MBS",
            "MBS is not assigned",
            "write its value",
        ),
        ("--seq-length 8192", "accepts at most 4096", "use 4096"),
    ] {
        let message = unsupported(Framework::Megatron, &format!("{megatron}{flags}"));
        assert!(
            message.contains(why) && message.contains(nearest),
            "{flags}: {message}"
        );
    }
    for (toml, why, nearest) in [
        (
            "[model]\nname = \"qwen3\"\nflavor = \"30B-A3B\"\n[parallelism]\ndata_parallel_shard_degree = 2\n\
             [activation_checkpoint]\nmode = \"selective\"\nselective_ac_option = \"op\"",
            "dense blocks only",
            "full",
        ),
        (
            "[parallelism]\ndata_parallel_shard_degree = 2\n[activation_checkpoint]\nmode = \"selective\"",
            "same recomputation in every block",
            "full",
        ),
        (
            "[activation_checkpoint]\nmode = \"none\"",
            "the number of ranks",
            "pass the world size",
        ),
        (
            "[parallelism]\ntensor_paralel_degree = 2",
            "does not recognize",
            "tensor_parallel_degree",
        ),
        (
            "[parallelism]\ndata_parallel_shard_degree = 2\npipeline_parallel_degree = 2\n[training]\nglobal_batch_size = 64",
            "drain several times",
            "local_batch_size = 32",
        ),
        (
            "[parallelism]\ndata_parallel_shard_degree = 2\npipeline_parallel_schedule = \"InterleavedZeroBubble\"",
            "no such schedule",
            "ZBVZeroBubble",
        ),
    ] {
        let message = unsupported(Framework::Torchtitan, toml);
        assert!(
            message.contains(why) && message.contains(nearest),
            "{toml}: {message}"
        );
    }
    for (json, why, nearest) in [
        (
            r#"{"train_batch_size": "auto"}"#,
            "the number of ranks",
            "pass the world size",
        ),
        (
            r#"{"train_batch_size": 8, "fp16": {"enabled": true}, "bf16": {"enabled": true}}"#,
            "one type",
            "disable one",
        ),
        (
            r#"{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 1}"#,
            "not a multiple of 3",
            "micro x",
        ),
        (
            r#"{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}"#,
            "the sequence length",
            "separately",
        ),
    ] {
        let message = unsupported(Framework::DeepSpeed, json);
        assert!(
            message.contains(why) && message.contains(nearest),
            "{json}: {message}"
        );
    }
}

#[test]
fn the_world_size_must_match_the_degrees() {
    let error = Framework::Megatron
        .write(&llama(), &plain(), 9)
        .unwrap_err();
    assert!(error.to_string().contains("multiply to 8"), "{error}");
}

#[test]
fn what_an_estimate_leaves_out_is_named() {
    let json = r#"{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1,
        "fp16": {"enabled": true}, "trainyard": {"seq_len": 8},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}"#;
    let read = Framework::DeepSpeed.read(json).unwrap();
    assert_eq!(read.strategy.offload, Offload::None);
    assert!(read.unmodeled[0].contains("without offload_param"));
    assert!(read.unmodeled[1].contains("fp16"));
}

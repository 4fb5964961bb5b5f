//! What means something else, or nothing, is refused, with what would work.

use super::*;

fn refusal(framework: Framework, text: &str) -> String {
    framework.read(text).unwrap_err().to_string()
}

#[test]
fn other_meanings_are_refused_with_what_works() {
    let megatron = "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 \
                    --num-attention-heads 32 --max-position-embeddings 4096 --padded-vocab-size 32000 \
                    --micro-batch-size 1 --seq-length 4096 ";
    for (flags, why, nearest) in [
        (
            "--global-batch-size 12 --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2",
            "divisible by the 4 ranks",
            "8 micro-batches",
        ),
        ("--fp16", "scaled", "--bf16"),
        ("--optimizer-cpu-offload", "states alone", "remove"),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 4",
            "every block",
            "uniform",
        ),
        (
            "--num-experts 8 --moe-ffn-hidden-size 64 --tensor-model-parallel-size 2",
            "whole experts",
            "--expert-tensor-parallel-size 1",
        ),
        ("--context-parallel-size 3", "do not divide", "multiple"),
        (
            "--tensor-model-parallel-sise 2",
            "does not know",
            "--tensor-model-parallel-size",
        ),
        ("--micro-batch-size $MBS", "shell", "value itself"),
        ("--seq-length 8192", "accepts 4096", "use 4096"),
    ] {
        let message = refusal(Framework::Megatron, &format!("{megatron}{flags}"));
        assert!(
            message.contains(why) && message.contains(nearest),
            "{flags}: {message}"
        );
    }
    for (toml, why, nearest) in [
        (
            "[model]\nname = \"qwen3\"\nflavor = \"30B-A3B\"\n[parallelism]\ndata_parallel_shard_degree = 2\n\
             [activation_checkpoint]\nmode = \"selective\"\nselective_ac_option = \"op\"",
            "dense blocks alone",
            "full",
        ),
        (
            "[parallelism]\ndata_parallel_shard_degree = 2\n[activation_checkpoint]\nmode = \"selective\"",
            "the same in every block",
            "full",
        ),
        (
            "[activation_checkpoint]\nmode = \"none\"",
            "how many ranks",
            "tell the number",
        ),
        (
            "[parallelism]\ntensor_paralel_degree = 2",
            "does not know",
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
        let message = refusal(Framework::Torchtitan, toml);
        assert!(
            message.contains(why) && message.contains(nearest),
            "{toml}: {message}"
        );
    }
    for (json, why, nearest) in [
        (r#"{"train_batch_size": "auto"}"#, "auto", "number"),
        (
            r#"{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 1}"#,
            "no multiple of 3",
            "micro x",
        ),
        (
            r#"{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}"#,
            "length of sequences",
            "beside",
        ),
        (
            r#"{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "trainyard": {"seq_len": 8}, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}"#,
            "both",
            "same device",
        ),
    ] {
        let message = refusal(Framework::DeepSpeed, json);
        assert!(
            message.contains(why) && message.contains(nearest),
            "{json}: {message}"
        );
    }
}

#[test]
fn the_ranks_must_be_those_of_the_degrees() {
    let error = Framework::Megatron
        .write(&llama(), &plain(), 9)
        .unwrap_err();
    assert!(error.to_string().contains("multiply to 8"), "{error}");
}

"""torchtitan's own Llama 3, divided by its own functions. ./setup does not install it:

    pip install --no-deps torchtitan==0.3.0 spmd_types==0.2.3 torch_checkpointing torchdata tyro docstring_parser typeguard shtab einops

Attention is PyTorch's scaled_dot_product_attention: torchtitan's FlexAttention has to be compiled for a real GPU.
"""

from contextlib import nullcontext
from dataclasses import replace

import torch

from strategies import FSDP2Trainer, TensorParallelTrainer


def build(job, *, tp: int, sequence_parallel: bool = False):
    """The model on its device, divided over `tp` ranks, and over the others as shards."""
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.models.llama3.parallelize import parallelize_llama

    parallelism = ParallelismConfig(
        data_parallel_shard_degree=job.world // tp, tensor_parallel_degree=tp, spmd_backend="partial_dtensor"
    )
    with torch.device("meta"):
        model = config(job, sequence_parallel).build()
    parallelize_llama(
        model,
        parallel_dims=ParallelDims.from_config(parallelism, job.world),
        training=TrainingConfig(mixed_precision_param="bfloat16", mixed_precision_reduce="float32"),
        parallelism=parallelism,
        compile_config=CompileConfig(),
        ac_config=None,
        dump_folder="",
    )
    job.autocast = nullcontext  # the types are those of FSDP2's policy
    model.to_empty(device=job.device)
    with torch.no_grad():
        model.init_weights(buffer_device=job.device)
    return model


def config(job, sequence_parallel: bool):
    """torchtitan's model with the shapes of `job.cfg` and, like those of the other peers, without tied weights."""
    from torch.nn.attention import SDPBackend
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import llama3_configs
    from torchtitan.models.llama3.sharding import set_llama3_sharding_config

    ScaledDotProductAttention.sdpa_backends = [SDPBackend.FLASH_ATTENTION]  # the one that others use, and not cuDNN's
    found = llama3_configs[job.args.preset.upper()](attn_backend="varlen")
    embedding = replace(found.tok_embeddings, param_init=llama3_configs["8B"](attn_backend="varlen").tok_embeddings.param_init)
    found = replace(found, enable_weight_tying=False, tok_embeddings=embedding, layers=found.layers[: job.cfg.layers])
    for layer in found.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        layer.attention.rope = replace(layer.attention.rope, max_seq_len=job.cfg.seq)
    set_llama3_sharding_config(found, enable_sp=sequence_parallel)
    return found


def fsdp2(job):
    return FSDP2Trainer(job, build(job, tp=1), share=(job.rank, job.world))


def tp_sp(job):
    return TensorParallelTrainer(job, build(job, tp=job.world, sequence_parallel=True))


STRATEGIES = {"torchtitan_fsdp2": fsdp2, "torchtitan_tp_sp": tp_sp}

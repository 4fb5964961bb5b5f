"""Parses configs that Trainyard wrote with the frameworks' own config code, and prints the parsed values.

    python frameworks.py deepspeed|torchtitan|torchtitan-command-line|megatron < configs > values

Each input line is JSON, {"text": ..., "world": ...}. Each output line is JSON, too: the values of the framework's own
config objects after parsing and validation, under common names, or {"error": ...}.
"""

import importlib
import importlib.abc
import importlib.machinery
import json
import os
import shlex
import sys
import tempfile
import types
import warnings

warnings.simplefilter("ignore")


class StubModule(types.ModuleType):
    """A stub for packages that parsing a config does not use: the frameworks import them for data and logging."""

    __path__ = []
    __version__ = "2.99.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    NAMES = {"tensorboard", "datasets", "torchdata", "wandb", "torch_checkpointing", "torchao", "PIL"}

    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in self.NAMES or name == "torch.utils.tensorboard":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return StubModule(spec.name)

    def exec_module(self, module):
        pass


def torchtitan_dims(config, world, tail):
    """Validates the parallel degrees with torchtitan's own check, and returns the resulting values."""
    from torchtitan.distributed.parallel_dims import ParallelDims

    p = config.parallelism
    dims = ParallelDims(
        dp_replicate=p.data_parallel_replicate_degree,
        dp_shard=p.data_parallel_shard_degree,
        cp=p.context_parallel_degree,
        tp=p.tensor_parallel_degree,
        pp=p.pipeline_parallel_degree,
        ep=p.expert_parallel_degree,
        world_size=world,
        **tail,
    )
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
    values = {name: getattr(dims, name) for name in names}
    values["micro_batch"] = config.training.local_batch_size
    if dims.pp > 1:
        from torch.distributed.pipelining.schedules import get_schedule_class

        get_schedule_class(p.pipeline_parallel_schedule)
        values["micro_batch"] = p.pipeline_parallel_microbatch_size
    values["global_batch"] = config.training.global_batch_size
    values["seq_len"] = config.training.seq_len
    values["offload"] = config.training.enable_cpu_offload
    return values


def torchtitan(text, world):
    from torchtitan.config import ConfigManager

    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(text)
        file.flush()
        config = ConfigManager().parse_args(["--job.config_file", file.name])
    values = torchtitan_dims(config, world, {"etp": config.parallelism.expert_tensor_parallel_degree})
    values["recomputes"] = config.activation_checkpoint.mode == "full"
    module = importlib.import_module(f"torchtitan.models.{config.model.name}")
    args = getattr(module, f"{config.model.name}_args")[config.model.flavor]
    values.update(
        num_layers=args.n_layers,
        hidden_size=args.dim,
        vocab_size=args.vocab_size,
        num_attention_heads=args.n_heads,
        num_key_value_heads=args.n_kv_heads or args.n_heads,
        head_dim=getattr(args, "head_dim", args.dim // args.n_heads),
        intermediate_size=getattr(args, "hidden_dim", None) or llama_ffn_size(args),
        tie_word_embeddings=getattr(args, "enable_weight_tying", False),
        experts=None,
    )
    if getattr(args, "moe_enabled", False):
        experts = args.moe_args
        values["experts"] = [experts.num_experts, experts.top_k, args.moe_inter_dim]
    return values


def llama_ffn_size(args):
    """Llama's feed-forward size. torchtitan's module computes it from a multiplier, so build the module."""
    import torch
    from torchtitan.models.llama3.model.model import FeedForward

    with torch.device("meta"):
        module = FeedForward(args.dim, 4 * args.dim, args.multiple_of, args.ffn_dim_multiplier)
    return module.w1.out_features


def torchtitan_command_line(text, world):
    from torchtitan.config import ConfigManager

    words = shlex.split(text.replace("\\\n", " "))
    config = ConfigManager().parse_args(words[words.index("torchtitan.train") + 1 :])
    values = torchtitan_dims(config, world, {})
    policy = config.activation_checkpoint
    values["recomputes"] = policy is not None and type(policy).__qualname__ == "FullAC.Config"
    values["sequence_parallel"] = config.parallelism.enable_sequence_parallel
    model = config.model_spec.model
    values["num_layers"], values["hidden_size"] = len(model.layers), model.dim
    return values


def deepspeed(text, world):
    from deepspeed.runtime.config import DeepSpeedConfig

    given = json.loads(text)

    class Ranks:
        """The object that DeepSpeed asks for the number of data-parallel ranks."""

        @staticmethod
        def get_data_parallel_world_size():
            return world

    import deepspeed.comm as dist

    # Parsing a file needs no process group: act as rank 0.
    dist.get_rank = lambda *a, **k: 0
    config = DeepSpeedConfig(given, mpu=Ranks())
    zero = config.zero_config
    device = lambda section: str(getattr(section.device, "value", section.device)) if section else "none"
    return {
        "global_batch": config.train_batch_size,
        "micro_batch": config.train_micro_batch_size_per_gpu,
        "steps": config.gradient_accumulation_steps,
        "zero_stage": int(zero.stage),
        "offload_optimizer": device(zero.offload_optimizer),
        "offload_param": device(zero.offload_param),
        "bf16": config.bfloat16_config.enabled,
        "grad_accum_dtype": config.grad_accum_dtype,
        "tp": max(config.tensor_parallel_config.autotp_size, 1),
    }


def megatron(text, world):
    """The package does not contain Megatron's argument parser, but the dataclass that the flags fill in."""
    import dataclasses

    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    words = shlex.split(text.replace("\\\n", " "))
    words = words[words.index("pretrain_gpt.py") + 1 :]
    flags, name = {}, None
    for word in words:
        if word.startswith("--"):
            name = word[2:].replace("-", "_")
            flags[name] = True
        else:
            flags[name] = int(word) if word.isdigit() else word
    renamed = {
        "add_bias_linear": not flags.pop("disable_bias_linear", False),
        "gated_linear_unit": flags.pop("swiglu", False),
        "virtual_pipeline_model_parallel_size": flags.pop("num_virtual_stages_per_pipeline_rank", None),
        "params_dtype": torch.bfloat16 if flags.get("bf16") else torch.float32,
        "pipeline_dtype": torch.bfloat16 if flags.get("bf16") else torch.float32,
        "num_moe_experts": flags.pop("num_experts", None),
    }
    if "moe_layer_freq" in flags:
        flags["moe_layer_freq"] = eval(flags["moe_layer_freq"], {"__builtins__": {}})
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    config = TransformerConfig(**{k: v for k, v in {**flags, **renamed}.items() if k in fields})
    names = (
        "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size "
        "expert_model_parallel_size sequence_parallel num_layers hidden_size ffn_hidden_size "
        "num_attention_heads num_query_groups kv_channels recompute_granularity recompute_num_layers "
        "virtual_pipeline_model_parallel_size normalization add_bias_linear bf16"
    )
    return {name: getattr(config, name) for name in names.split()}


def main():
    which = sys.argv[1]
    sys.meta_path.insert(0, StubFinder())
    function = globals()[which.replace("-", "_")]
    # The frameworks log to stdout: redirect that to stderr, so that stdout has the parsed values only.
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        job = json.loads(line)
        try:
            values = function(job["text"], job["world"])
        except (Exception, SystemExit) as error:
            values = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(values), file=output, flush=True)


if __name__ == "__main__":
    main()

"""Gives configs that Trainyard wrote to the frameworks' own config code, and says what they understood.

    python frameworks.py deepspeed|torchtitan|torchtitan-command-line|megatron < texts > answers

Texts are lines of JSON, {"text": ..., "world": ...}. The answer to each is a line: what the framework's own
objects say after parsing and checking, under names of ours, or {"error": ...}.
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


class Absent(types.ModuleType):
    """A package that the frameworks import but whose work, data and logging, no config needs."""

    __path__ = []
    __version__ = "2.99.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class AbsentFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    NAMES = {"tensorboard", "datasets", "torchdata", "wandb", "torch_checkpointing", "torchao", "PIL"}

    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in self.NAMES or name == "torch.utils.tensorboard":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Absent(spec.name)

    def exec_module(self, module):
        pass


def torchtitans_dims(config, world, tail):
    """torchtitan's own check that the degrees make the world, and what they are after it."""
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
    answer = {name: getattr(dims, name) for name in names}
    answer["micro_batch"] = config.training.local_batch_size
    if dims.pp > 1:
        from torch.distributed.pipelining.schedules import get_schedule_class

        get_schedule_class(p.pipeline_parallel_schedule)
        answer["micro_batch"] = p.pipeline_parallel_microbatch_size
    answer["global_batch"] = config.training.global_batch_size
    answer["seq_len"] = config.training.seq_len
    answer["offload"] = config.training.enable_cpu_offload
    return answer


def torchtitan(text, world):
    from torchtitan.config import ConfigManager

    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(text)
        file.flush()
        config = ConfigManager().parse_args(["--job.config_file", file.name])
    answer = torchtitans_dims(config, world, {"etp": config.parallelism.expert_tensor_parallel_degree})
    answer["recomputes"] = config.activation_checkpoint.mode == "full"
    module = importlib.import_module(f"torchtitan.models.{config.model.name}")
    args = getattr(module, f"{config.model.name}_args")[config.model.flavor]
    answer.update(
        num_layers=args.n_layers,
        hidden_size=args.dim,
        vocab_size=args.vocab_size,
        num_attention_heads=args.n_heads,
        num_key_value_heads=args.n_kv_heads or args.n_heads,
        head_dim=getattr(args, "head_dim", args.dim // args.n_heads),
        intermediate_size=getattr(args, "hidden_dim", None) or llamas_width(args),
        tie_word_embeddings=getattr(args, "enable_weight_tying", False),
        experts=None,
    )
    if getattr(args, "moe_enabled", False):
        experts = args.moe_args
        answer["experts"] = [experts.num_experts, experts.top_k, args.moe_inter_dim]
    return answer


def llamas_width(args):
    """The width that Llama's feed-forward part takes from multiples, asked of the part itself."""
    import torch
    from torchtitan.models.llama3.model.model import FeedForward

    with torch.device("meta"):
        part = FeedForward(args.dim, 4 * args.dim, args.multiple_of, args.ffn_dim_multiplier)
    return part.w1.out_features


def torchtitan_command_line(text, world):
    from torchtitan.config import ConfigManager

    words = shlex.split(text.replace("\\\n", " "))
    config = ConfigManager().parse_args(words[words.index("torchtitan.train") + 1 :])
    answer = torchtitans_dims(config, world, {})
    policy = config.activation_checkpoint
    answer["recomputes"] = policy is not None and type(policy).__qualname__ == "FullAC.Config"
    answer["sequence_parallel"] = config.parallelism.enable_sequence_parallel
    model = config.model_spec.model
    answer["num_layers"], answer["hidden_size"] = len(model.layers), model.dim
    return answer


def deepspeed(text, world):
    from deepspeed.runtime.config import DeepSpeedConfig

    given = json.loads(text)

    class Ranks:
        """What DeepSpeed asks for the number of data-parallel ranks."""

        @staticmethod
        def get_data_parallel_world_size():
            return world

    import deepspeed.comm as dist

    # No process group is needed to parse a file: this rank is the first of so many.
    dist.get_rank = lambda *a, **k: 0
    config = DeepSpeedConfig(given, mpu=Ranks())
    zero = config.zero_config
    device = lambda part: str(getattr(part.device, "value", part.device)) if part else "none"
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
    """Megatron's parser is not in the package, but the dataclass that its flags fill in is."""
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
    sys.meta_path.insert(0, AbsentFinder())
    function = globals()[which.replace("-", "_")]
    # What the frameworks log goes to stderr; answers alone to stdout.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        job = json.loads(line)
        try:
            answer = function(job["text"], job["world"])
        except (Exception, SystemExit) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()

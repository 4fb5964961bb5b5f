"""The methods of data parallelism that the scripts in this folder compare, and the text that they train on.

The text is the Rust code of this repository as bytes: every tenth file is held out. The samples of a step are the same for all
methods; only what ranks exchange differs.
"""

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "faults"))
from cluster import STEP
from programs import ROOT, config_options, program, run

VALIDATED = re.compile(r"step:\s*(\d+)\s+validation loss:\s*([\d.]+)")
WARMUP = 50  # steps
HELD_OUT = 10  # one of this many files
# Movements of so few steps point in the same direction from one outer step to the next, so the usual 0.7 and 0.9 go too far.
TUNED = {"outer_lr": 0.5, "outer_momentum": 0.5}


def compressed(name, **keys):
    return {"parallelism.gradient_compression": name, **{f"parallelism.{key}": value for key, value in keys.items()}}


def local_updates(name, sync_steps, **keys):
    keys = {"method": name, "sync_steps": sync_steps, **keys}
    return {f"local_updates.{key}": value for key, value in keys.items()}


def outer(num_replicas, *args, **keys):
    return {"parallelism.data_parallel_outer_degree": num_replicas, **local_updates(*args, **keys)}


class Method:
    """How ranks exchange what they have learned."""

    def __init__(self, keys, num_servers=0):
        self.keys, self.num_servers = keys, num_servers

    def launch(self, num_ranks):
        """The launcher's options on one host."""
        mode = ["--servers", str(self.num_servers)] if self.num_servers else ["--standalone"]
        return [program("trainyard"), "run", *mode, "--nproc-per-node", str(num_ranks), "--"]

    @property
    def steps_per_record(self):
        """Steps of a replica in a step of the metrics."""
        return int(self.keys["local_updates.sync_steps"]) if self.num_servers and "local_updates.sync_steps" in self.keys else 1


def methods(num_replicas):
    return {
        "synchronous": Method({}),
        "int8": Method(compressed("int8")),
        "top-k 1 %": Method(compressed("top_k", gradient_compression_ratio=0.01)),
        "PowerSGD, rank 4": Method(compressed("power_sgd", power_sgd_rank=4, power_sgd_start_step=2 * WARMUP)),
        "DiLoCo, 25 steps": Method(outer(num_replicas, "diloco", 25)),
        "DiLoCo, 25 steps, tuned": Method(outer(num_replicas, "diloco", 25, **TUNED)),
        "DiLoCo, 100 steps": Method(outer(num_replicas, "diloco", 100)),
        "DiLoCo, 100 steps, tuned": Method(outer(num_replicas, "diloco", 100, **TUNED)),
        "SparseLoCo, 25 steps": Method(outer(num_replicas, "sparse_loco", 25)),
        "SparseLoCo, 25 steps, 10 %": Method(outer(num_replicas, "sparse_loco", 25, compression_ratio=0.1)),
        "DiLoCo by a server, 25 steps": Method(local_updates("diloco", 25), num_servers=1),
        "server, s = 0": Method({"parameter_server.staleness": 0}, num_servers=1),
        "server, s = 4": Method({"parameter_server.staleness": 4}, num_servers=1),
        "server, s = inf": Method({"parameter_server.staleness": "inf"}, num_servers=1),
    }


def write_text(folder):
    """Writes the tokens to train on and those that are held out, as `training` and `validation` in a folder."""
    listed = subprocess.run(["git", "ls-files", "*.rs"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    files = sorted(listed.split())
    tokenizer = folder / "bytes.json"
    tokenizer.write_text(json.dumps(byte_tokenizer()))
    for name, held_out in [("training", False), ("validation", True)]:
        text = folder / f"{name}.jsonl"
        with open(text, "w") as output:
            for number, file in enumerate(files):
                if (number % HELD_OUT == 0) == held_out:
                    print(json.dumps({"text": (ROOT / file).read_text()}), file=output)
        command = [program("trainyard"), "data", "prepare", "--tokenizer", str(tokenizer), "--end-of-document", "<end>"]
        subprocess.run([*command, "--output", str(folder / name), str(text)], check=True, capture_output=True)


def byte_tokenizer():
    """A tokenizer whose tokens are bytes."""
    visible = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    names = {byte: chr(byte) for byte in visible} | {byte: chr(256 + number) for number, byte in enumerate(others)}
    vocabulary = {names[byte]: byte for byte in range(256)}
    end = {"id": 256, "content": "<end>", "special": True}
    flags = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False)
    pre_tokenizer = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "vocab": vocabulary, "merges": [], "byte_fallback": False, "ignore_merges": False, "fuse_unk": False}
    common = {"normalizer": None, "post_processor": None, "decoder": None, "truncation": None, "padding": None}
    return {"version": "1.0", **common, "added_tokens": [end | flags], "pre_tokenizer": pre_tokenizer, "model": model}


@dataclass
class Start:
    """A checkpoint of synchronous training, from which all methods continue."""

    checkpoint: Path
    step: int


def pretrain(text, folder, num_ranks, steps, local_batch):
    keys = {
        "checkpoint.enable": "true",
        "checkpoint.interval": steps,
        "lr_scheduler.min_lr_factor": 1.0,
    }
    command = train(text, folder, steps, keys, local_batch)
    run([*Method({}).launch(num_ranks), *command], timeout=7200)
    return Start(Path(folder) / "checkpoint" / f"step-{steps}", steps)


def train(text, output, steps, keys, local_batch=8, start=None):
    """The command of a rank that takes some steps, from random weights or from a checkpoint. The learning rate falls in these steps."""
    if start:
        steps += start.step
        decay_ratio = (steps - start.step) / steps
        keys = {"checkpoint.initial_load_path": start.checkpoint, "lr_scheduler.decay_ratio": decay_ratio, **keys}
    keys = {
        "model.vocab_size": 257,
        "training.dataset": "tokens",
        "training.dataset_path": text / "training",
        "training.steps": steps,
        "training.local_batch_size": local_batch,
        "optimizer.lr": 2e-3,
        "lr_scheduler.warmup_steps": WARMUP,
        "lr_scheduler.decay_type": "cosine",
        "lr_scheduler.min_lr_factor": 0.1,
        "validation.enable": "true",
        "validation.dataset_path": text / "validation",
        "validation.freq": 100,
        "validation.steps": 8,
        "metrics.log_freq": 50,
        "metrics.enable_jsonl": "true",
        "job.dump_folder": output,
        **keys,
    }
    return [program("trainyard"), "train", str(ROOT / "configs" / "llama-tiny.toml"), *config_options(keys)]


def steps_per_second(lines, method, num_skipped):
    """The speed of a run from its output with timestamps, without the first records."""
    times = [at for at, line in lines if STEP.search(line)][num_skipped:]
    return (len(times) - 1) * method.steps_per_record / (times[-1] - times[0])


def validation_losses(output, steps_per_record=1):
    """The validation losses that a run has written, by step."""
    losses = {}
    for file in sorted(Path(output).rglob("*.jsonl")):
        for line in file.read_text().splitlines():
            record = json.loads(line)
            if "validation_loss" in record:
                losses[record["step"] * steps_per_record] = record["validation_loss"]
    return losses

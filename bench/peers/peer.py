"""Train a small model with one PyTorch parallelism strategy on CPU and report speed and losses.

    torchrun --standalone --nproc-per-node=2 peer.py --strategy ddp --preset tiny
    python peer.py --strategy single --preset tiny

The last line on standard output (rank 0) is one JSON object; see README.md for its fields.
"""

import os

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import argparse
import json
import sys
import time
import warnings
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from statistics import mean

warnings.filterwarnings("ignore", category=FutureWarning)

import torch
import torch.distributed as dist
import torch.nn.functional as F

from determinism import image_batch, init_parameters, token_batch
from measure import cpu_seconds, minor_faults, peak_rss_mb, quantile, rss_mb, tcp_bytes, thread_seconds
from model import PRESETS, Config, Llama, SimpleCNN, lm_loss
from strategies import STRATEGIES

CNN_BATCH = 64


def parse_args():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--strategy", choices=STRATEGIES, required=True)
    p.add_argument("--preset", choices=[*PRESETS, "cnn"], default="tiny")
    shape = p.add_argument_group("model shape (overrides the preset)")
    for f in fields(Config):
        if f.type is int:
            shape.add_argument("--" + f.name.replace("_", "-"), type=int)
    p.add_argument("--micro-batches", type=int, help="default: 4 for pipelines, 1 otherwise")
    p.add_argument("--dtype", choices=["fp32", "bf16", "bf16_pure"], default="fp32")
    p.add_argument("--steps", type=int, default=20, help="timed steps, at least 1")
    p.add_argument("--warmup", type=int, default=3, help="untimed steps before them; they train too")
    p.add_argument("--threads", type=int, default=1, help="intra-op threads per rank")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--compile", action="store_true", help="torch.compile every block")
    p.add_argument("--bucket-mb", type=float, default=25, help="DDP bucket size")
    p.add_argument("--no-reshard", action="store_true", help="fsdp: keep parameters after forward")
    p.add_argument("--tp", type=int, default=2, help="tensor-parallel ranks in the 2-D strategies")
    p.add_argument("--ep", type=int, default=0, help="expert-parallel ranks (default: all)")
    p.add_argument("--expert-loop", action="store_true", help="experts one after the other, not by grouped_mm")
    p.add_argument("--stages-per-rank", type=int, default=2, help="for pp_interleaved")
    p.add_argument("--bare-kind", choices=["dp", "tp", "pp"], default="dp")
    p.add_argument("--bare-world", type=int, help="ranks that share the work (default: the world size)")
    p.add_argument("--init-safetensors", type=Path, help="load initial weights")
    p.add_argument("--dump-init", type=Path, help="save initial weights (single only) and go on")
    return p.parse_args()


class Job:
    """Everything a strategy needs to know: who we are, what to train, how to make a model."""

    device = torch.device("cpu")

    def __init__(self, args):
        self.args = args
        self.rank = int(os.environ.get("RANK", 0))
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        self.bare_world = args.bare_world or self.world
        self.micro = args.micro_batches or (4 if "pp" in (args.strategy.split("_")[0], args.bare_kind) else 1)
        self.is_cnn = args.preset == "cnn"
        if self.is_cnn:
            self.cfg, self.batch, self.samples = None, args.batch or CNN_BATCH, args.batch or CNN_BATCH
            self.loss_fn = F.cross_entropy
        else:
            given = {f.name: getattr(args, f.name, None) for f in fields(Config)}
            given = {name: value for name, value in given.items() if value is not None}
            if "dim" in given or "heads" in given:
                given.setdefault("head_dim", 0)
            self.cfg = replace(PRESETS[args.preset], **given)
            if args.expert_loop:
                self.cfg = replace(self.cfg, moe=replace(self.cfg.moe, loop=True))
            self.batch, self.samples = self.cfg.batch, self.cfg.batch * self.cfg.seq
            self.loss_fn = lm_loss
        mixed = args.dtype == "bf16"
        self.autocast = partial(torch.autocast, self.device.type, dtype=torch.bfloat16) if mixed else nullcontext
        self.param_dtype = torch.bfloat16 if args.dtype == "bf16_pure" else torch.float32

    def model(self, cfg=None, **part):
        """A new model, or a part of one, with its initial weights."""
        model = SimpleCNN() if self.is_cnn else Llama(cfg or self.cfg, **part)
        if self.args.init_safetensors:
            from safetensors import safe_open

            with safe_open(self.args.init_safetensors, "pt") as f, torch.no_grad():
                modules = dict(model.named_modules())
                for name, p in model.named_parameters():
                    first = getattr(modules[name.rpartition(".")[0]], "first", None)
                    saved = f.get_tensor(name)
                    p.copy_(saved if first is None else saved[first : first + len(p)])
        else:
            init_parameters(model, self.args.seed)
        if self.args.dump_init:
            if self.args.strategy != "single":
                sys.exit("--dump-init needs --strategy single")
            from safetensors.torch import save_file

            tensors = {name: p.detach() for name, p in model.named_parameters()}
            save_file(tensors, self.args.dump_init)
        model.to(self.param_dtype)
        if self.args.compile:
            for part in [model] if self.is_cnn else model.blocks:
                part.compile()
        return model

    def materialize(self, model):
        """The model with its weights in memory, which it has on CPU from the beginning."""
        return model

    def data(self, step):
        if self.is_cnn:
            x, y = image_batch(step, self.batch, self.args.seed)
            return x.to(self.param_dtype), y
        return token_batch(step, self.batch, self.cfg.seq, self.cfg.vocab, self.args.seed)


def gather(values: list[float], distributed: bool) -> list[list[float]]:
    """The same-length list of every rank, on every rank."""
    if not distributed:
        return [values]
    mine = torch.tensor(values, dtype=torch.float64)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return [t.tolist() for t in everyone]


def main():
    args = parse_args()
    torch.set_num_threads(args.threads)
    job = Job(args)
    distributed = "RANK" in os.environ
    if distributed:
        dist.init_process_group("gloo")
    rss_before = rss_mb()

    batches = [job.data(step) for step in range(args.warmup + args.steps)]
    trainer = STRATEGIES[args.strategy](job)

    losses, weights, norms, times = [], [], [], []
    for step, (x, y) in enumerate(batches):
        if step == args.warmup:
            if distributed:
                dist.barrier()
            wire_before, cpu_before = tcp_bytes(), cpu_seconds()
            threads_before, faults_before = thread_seconds(), minor_faults()
        start = time.perf_counter()
        loss, weight, norm = trainer.step(x, y)
        times.append(time.perf_counter() - start)
        losses.append(loss * weight)
        weights.append(weight)
        norms.append(norm)
    cpu_ms = 1e3 * (cpu_seconds() - cpu_before) / args.steps
    threads = thread_seconds()
    thread_ms = [1e3 * (threads[name] - threads_before[name]) / args.steps for name in threads]
    faults = (minor_faults() - faults_before) / args.steps
    if distributed:
        dist.barrier()  # everything sent is acknowledged by now
    wire_after = tcp_bytes()

    all_losses, all_weights = gather(losses, distributed), gather(weights, distributed)
    all_times = gather(times[args.warmup :], distributed)
    wire = gather([(wire_after[k] - wire_before[k]) / args.steps for k in ("sent", "received")], distributed)
    memory = gather([rss_before, peak_rss_mb()], distributed)
    all_cpu = gather([cpu_ms, *thread_ms, faults], distributed)

    if job.rank == 0:
        # ranks that work together are as fast as the slowest; bare ranks do not wait for each other
        combine = mean if args.strategy == "bare" else max
        step_ms = [1e3 * combine(step) for step in zip(*all_times)]
        median = quantile(step_ms, 0.5)
        result = {
            "impl": "pytorch",
            "version": torch.__version__,
            "strategy": args.strategy + (f"_{args.bare_kind}" if args.strategy == "bare" else ""),
            "preset": args.preset,
            "world": job.bare_world if args.strategy == "bare" else job.world,
            "processes": job.world,
            "threads": args.threads,
            "dtype": args.dtype,
            "compile": args.compile,
            "batch": job.batch,
            "seq": job.cfg.seq if job.cfg else None,
            "micro_batches": job.micro,
            "warmup": args.warmup,
            "steps": args.steps,
            "losses": [sum(loss) / sum(weight) for loss, weight in zip(zip(*all_losses), zip(*all_weights))],
            "grad_norms": norms,
            "tokens_per_s": job.samples / median * 1e3,
            "step_ms_median": median,
            "step_ms_p10": quantile(step_ms, 0.1),
            "cpu_ms_per_step_per_rank": [round(c[0], 1) for c in all_cpu],
            "main_running_ms_per_step_per_rank": [c[1] for c in all_cpu],
            "main_waiting_for_core_ms_per_step_per_rank": [c[2] for c in all_cpu],
            "other_threads_ms_per_step_per_rank": [c[3] for c in all_cpu],
            "minor_faults_per_step_per_rank": [c[4] for c in all_cpu],
            "peak_rss_mb_per_rank": [round(m[1], 1) for m in memory],
            "rss_mb_before_model_per_rank": [round(m[0], 1) for m in memory],
            "comm_bytes_per_step_per_rank": {
                "sent": [round(w[0]) for w in wire],
                "received": [round(w[1]) for w in wire],
            },
        }
        print(json.dumps(result), flush=True)
    if distributed:
        dist.destroy_process_group()
    # torch 2.13 sometimes aborts in interpreter shutdown after Gloo was used with several groups
    # ("terminate called without an active exception"), after all work is done: skip shutdown.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

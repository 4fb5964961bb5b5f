#!/usr/bin/env python3
"""Peak memory of one rank of PyTorch FSDP2, measured in one process on one GPU, real or simulated.

    trainyard simulate --memory 80 -- python fsdp_memory.py --preset 8b --world 8
    trainyard simulate --memory 80 -- python fsdp_memory.py --preset 8b --layers 4 --recompute --json

The other ranks do not exist: torch's fake process group completes every collective at once. As in torchtitan,
parameters and optimizer states are sharded in float32, layers compute in bfloat16, and gradients are reduced in
float32.
Exit status: 0 on success; 1 if the GPU's memory does not suffice; 2 if the run failed.
"""

import argparse
import json
import sys

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from peer_cuda import Job, add_model_arguments, train_step
from strategies import STRATEGIES


def parse_args():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(p, preset="8b")
    p.add_argument("--world", type=int, default=8, help="number of ranks, of which one is measured")
    p.add_argument("--rank", type=int, default=0, help="the rank to measure")
    p.add_argument("--steps", type=int, default=3)
    p.add_argument("--json", action="store_true", help="print the measurement as JSON")
    return p.parse_args()


def measure(args) -> dict:
    torch.cuda.set_device(0)
    dist.init_process_group("fake", store=FakeStore(), rank=args.rank, world_size=args.world)
    job = Job(args)
    trainer = STRATEGIES["fsdp2"](job)
    num_parameters = sum(p.numel() for p in trainer.params)
    for step in range(args.steps):
        train_step(job, trainer, job.batch(step))
    torch.cuda.synchronize()
    return {
        "version": torch.__version__,
        "preset": args.preset,
        **{key: getattr(job.cfg, key) for key in ("layers", "seq", "batch")},
        "world": args.world,
        "recompute": args.recompute,
        "steps": args.steps,
        "num_parameters": num_parameters,
        "max_memory_allocated": torch.cuda.max_memory_allocated(),
        "max_memory_reserved": torch.cuda.max_memory_reserved(),
        "num_alloc_retries": torch.cuda.memory_stats()["num_alloc_retries"],
    }


def table(result: dict) -> str:
    recompute = "every block recomputed" if result["recompute"] else "nothing recomputed"
    gib = {key: result[f"max_memory_{key}"] / 2**30 for key in ("allocated", "reserved")}
    return "\n".join(
        [
            f"{result['preset']}, {result['layers']} layers, {result['num_parameters'] / 1e9:.2f} B parameters, "
            f"{result['batch']} x {result['seq']} tokens, {recompute}: one rank of {result['world']}, "
            f"{result['steps']} steps",
            "",
            f"peak memory allocated {gib['allocated']:9.2f} GiB",
            f"peak memory reserved  {gib['reserved']:9.2f} GiB",
            f"allocations repeated after freeing cached memory: {result['num_alloc_retries']}",
        ]
    )


def main():
    args = parse_args()
    torch.set_num_threads(1)
    try:
        result = measure(args)
    except torch.cuda.OutOfMemoryError as error:
        print(f"fsdp_memory: {error}", file=sys.stderr)
        sys.exit(1)
    except (RuntimeError, ValueError) as error:
        print(f"fsdp_memory: {error}", file=sys.stderr)
        sys.exit(2)
    print(json.dumps(result) if args.json else table(result))


if __name__ == "__main__":
    main()

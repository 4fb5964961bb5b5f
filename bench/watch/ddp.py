"""A PyTorch script that knows nothing of Trainyard: DDP over Gloo, with a fault that it is asked for.

    python ddp.py [--steps N] [--stuck-rank R] [--stuck-at STEP] [--width N]
"""

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=1000000)
parser.add_argument("--stuck-rank", type=int)
parser.add_argument("--stuck-at", type=int, default=30)
parser.add_argument("--width", type=int, default=256)


def next_batch(step, options):
    """The data of a step; it never comes for a rank that is stuck."""
    while step == options.stuck_at and dist.get_rank() == options.stuck_rank:
        time.sleep(1)
    generator = torch.Generator().manual_seed(step)
    return torch.randn(16, options.width, generator=generator)


def train(model, optimizer, step, options):
    inputs = next_batch(step, options)
    loss = (model(inputs) - inputs).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def main():
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [torch.nn.Linear(options.width, options.width) for _ in range(8)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    times = []
    for step in range(1, options.steps + 1):
        began = time.perf_counter()
        loss = train(model, optimizer, step, options)
        times.append(time.perf_counter() - began)
        if step % 10 == 0 and dist.get_rank() == 0:
            print(f"step {step} loss {loss:.5f}", flush=True)
    if dist.get_rank() == 0:
        print(f"seconds per step: {statistics.median(times[len(times) // 10:]):.6f}", flush=True)
    dist.destroy_process_group()


if os.environ.get("RANK"):
    main()

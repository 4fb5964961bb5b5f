#!/usr/bin/env python3
"""Trains a small CNN with BatchNorm under DDP and under fully_shard, from given weights and on computed batches, in float64.

    torchrun --nproc-per-node 2 batch_norm.py WEIGHTS.json

Rank 0 prints a JSON object: for each strategy the parameters and buffers of rank 0, and the output of an evaluation.
"""

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

CHANNELS, SIDE, STEPS, LR, MOMENTUM = [1, 3, 3, 4], 5, 3, 0.1, 0.9


class Block(nn.Module):
    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(num_in, num_out, 3, padding=1)
        self.norm = nn.BatchNorm2d(num_out)
        self.is_last = num_out == CHANNELS[-1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(x))
        return x.mean(dim=(2, 3)) if self.is_last else x.relu()


class Convolutions(nn.Module):
    def __init__(self, weights: dict[str, list[float]]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(*pair) for pair in zip(CHANNELS, CHANNELS[1:]))
        self.double()
        with torch.no_grad():
            for name, tensor in self.state_dict().items():
                if name in weights:
                    tensor.copy_(torch.tensor(weights[name], dtype=tensor.dtype).view_as(tensor))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows and classes of a rank: one row more than the rank before has, with another mean and scale."""
    rows = 2 + rank
    count = torch.arange(rows * SIDE * SIDE, dtype=torch.float64)
    x = ((count + 1000.0 * rank + 100.0 * step) * 0.37).sin() * (1.0 + rank) + rank
    return x.view(rows, 1, SIDE, SIDE), (torch.arange(rows) + step) % CHANNELS[-1]


def train(model: nn.Module) -> None:
    size = dist.get_world_size()
    num_rows = sum(2 + rank for rank in range(size))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    for step in range(STEPS):
        x, classes = batch(dist.get_rank(), step)
        loss = nn.functional.cross_entropy(model(x), classes, reduction="sum")
        optimizer.zero_grad()
        (loss * size / num_rows).backward()  # both strategies average over ranks
        optimizer.step()


def outcome(model: nn.Module) -> dict[str, list[float]]:
    full = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in model.state_dict().items()}
    model.eval()
    with torch.no_grad():
        full["evaluation"] = model(batch(2, 77)[0])
    return {name.removeprefix("module."): tensor.double().flatten().tolist() for name, tensor in full.items()}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with open(sys.argv[1]) as file:
        weights = json.load(file)
    replicated = DistributedDataParallel(Convolutions(weights))
    sharded = Convolutions(weights)
    for block in sharded.blocks:
        fully_shard(block)
    fully_shard(sharded)
    found = {}
    for name, model in [("ddp", replicated), ("fsdp2", sharded)]:
        train(model)
        found[name] = outcome(model)
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

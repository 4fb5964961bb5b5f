"""Saves and loads a sharded model and its optimizer with torch.distributed.checkpoint.

    torchrun --standalone --nproc-per-node=2 peer_checkpoint.py --preset small --folder DIR [--repeats 3]

One JSON line: seconds of a save, of the pause of an asynchronous save, and of a load, one per repeat.
"""

import os

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import argparse
import json
import time
import warnings

warnings.filterwarnings("ignore")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from model import PRESETS, Llama


def together():
    dist.barrier()
    return time.perf_counter()


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--preset", default="small")
    p.add_argument("--folder", required=True)
    p.add_argument("--repeats", type=int, default=3)
    args = p.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo")
    config = PRESETS[args.preset]
    model = Llama(config)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.zeros(1, config.seq, dtype=torch.long)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

    def state():
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments}

    line = {"save": [], "pause": [], "load": []}
    for repeat in range(args.repeats):
        began = together()
        dcp.save(state(), checkpoint_id=f"{args.folder}/sync-{repeat}")
        line["save"].append(together() - began)
        began = together()
        response = dcp.async_save(state(), checkpoint_id=f"{args.folder}/async-{repeat}")
        line["pause"].append(time.perf_counter() - began)
        response.result()
        began = together()
        loaded = state()
        dcp.load(loaded, checkpoint_id=f"{args.folder}/sync-{repeat}")
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        line["load"].append(together() - began)
    if dist.get_rank() == 0:
        print(json.dumps(line))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

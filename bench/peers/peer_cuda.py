"""Train a Llama with one PyTorch parallelism strategy on GPUs, real or simulated, and mark every step for a profiler.

    trainyard simulate --gpus 2 --report 'counts-%r.json' -- \\
        torchrun --standalone --nproc-per-node=2 peer_cuda.py --strategy ddp --preset 1b --steps 10
    trainyard simulate --gpus 2 -- torchrun --standalone --nproc-per-node=2 peer_cuda.py --strategy tp --layers 4

Every step begins with cudaProfilerStart. The host reads neither the loss nor the gradient norm, so that it need not
wait for the device.
"""

import argparse
import os
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from determinism import token_batch
from model import GPU_PRESETS, Llama, lm_loss
from strategies import STRATEGIES
from torchtitan_llama import STRATEGIES as TORCHTITAN


def add_model_arguments(p: argparse.ArgumentParser, preset: str) -> None:
    p.add_argument("--preset", choices=GPU_PRESETS, default=preset)
    p.add_argument("--layers", type=int, help="number of blocks (default: by preset)")
    p.add_argument("--seq-len", type=int, help="sequence length (default: by preset)")
    p.add_argument("--local-batch", type=int, default=1, help="sequences per data-parallel rank")
    p.add_argument("--recompute", action="store_true", help="recompute every block in backward")
    # What the strategies ask for; here they have their defaults.
    p.set_defaults(dtype="bf16", bucket_mb=25, no_reshard=False)


def parse_args():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--strategy", choices=["ddp", "fsdp2", "tp", "tp_sp", *TORCHTITAN], required=True)
    p.add_argument("--steps", type=int, default=10)
    add_model_arguments(p, preset="1b")
    return p.parse_args()


class Job:
    """Everything a strategy needs to know. Models are made without memory, and get it on the device when a strategy
    has divided them."""

    micro = 1  # micro-batches
    loss_fn = staticmethod(lm_loss)

    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cuda", torch.cuda.current_device())
        given = {"layers": args.layers, "seq": args.seq_len, "batch": args.local_batch}
        self.cfg = replace(GPU_PRESETS[args.preset], **{key: value for key, value in given.items() if value})
        self.autocast = partial(torch.autocast, "cuda", dtype=torch.bfloat16)

    def model(self) -> Llama:
        with torch.device("meta"):
            model = Llama(self.cfg)
        if self.args.recompute:
            recompute_blocks(model)
        return model

    def materialize(self, model):
        model.to_empty(device=self.device)
        with torch.no_grad():
            for p in model.parameters():
                local = p.to_local() if isinstance(p, DTensor) else p
                local.normal_(std=0.02) if p.ndim > 1 else local.fill_(1.0)
        model.set_positions(torch.arange(self.cfg.seq, device=self.device))
        return model

    def batch(self, step: int):
        """The sequences of this rank, in pinned memory. All ranks train on the same ones, which affects no count."""
        tokens = token_batch(step, self.cfg.batch, self.cfg.seq, self.cfg.vocab, seed=1)
        return [part.pin_memory() for part in tokens]


def recompute_blocks(model: Llama) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for name, block in model.model.layers.items():
        model.model.layers[name] = checkpoint_wrapper(block, preserve_rng_state=False)


def train_step(job: Job, trainer, batch) -> None:
    x, y = (part.to(job.device, non_blocking=True) for part in batch)
    with trainer.loss_context():
        with job.autocast():
            loss = job.loss_fn(trainer.model(x), y)
        loss.backward()
    trainer.clip()
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()


def main():
    args = parse_args()
    torch.set_num_threads(1)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    job = Job(args)
    batches = [job.batch(step) for step in range(args.steps)]
    trainer = (STRATEGIES | TORCHTITAN)[args.strategy](job)
    for batch in batches:
        torch.cuda.cudart().cudaProfilerStart()
        train_step(job, trainer, batch)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

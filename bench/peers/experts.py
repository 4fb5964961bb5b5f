"""A mixture of experts as a block's feed-forward part, with and without expert parallelism.

Routing is DeepSeek-V3's or Mixtral's, by the preset; no token is dropped.  The weights of a layer's experts
are two parameters with an expert after the other, as in Hugging Face's models, and each is one
`grouped_mm` for all experts of a rank: on CPU that is faster here than a loop over `F.linear`
(`--expert-loop` to see).
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed._functional_collectives import all_to_all_single_autograd


@dataclass(frozen=True)
class Mixture:
    """The keys of `[model.moe]` in Trainyard's configs."""

    experts: int
    top_k: int
    width: int
    shared: int = 0
    dense_layers: int = 0
    sigmoid: bool = False
    bias_update_rate: float = 0.0
    aux_loss_coef: float = 0.0
    z_loss_coef: float = 0.0
    loop: bool = False


class Router(nn.Module):
    def __init__(self, dim: int, cfg: Mixture):
        super().__init__()
        self.cfg = cfg
        self.weight = nn.Parameter(torch.empty(cfg.experts, dim))
        if cfg.bias_update_rate:
            self.register_buffer("e_score_correction_bias", torch.zeros(cfg.experts))
        self.load = torch.zeros(cfg.experts, dtype=torch.int64)  # rows of each expert in this step

    def forward(self, x):
        """x: [batch, seq, dim].  Weights and numbers of the chosen experts, [tokens, top_k] each, the rows each
        expert gets, and what the balancing losses are."""
        cfg = self.cfg
        logits = F.linear(x.flatten(0, 1), self.weight).float()
        scores = logits.sigmoid() if cfg.sigmoid else logits.softmax(dim=-1)
        with torch.no_grad():
            preferred = scores + self.e_score_correction_bias if cfg.bias_update_rate else scores
            expert = preferred.topk(cfg.top_k, dim=-1).indices
            # of every sequence
            sequence = torch.arange(len(x)).repeat_interleave(x.shape[1])[:, None]
            counts = torch.bincount((sequence * cfg.experts + expert).flatten(), minlength=len(x) * cfg.experts)
            counts = counts.view(len(x), cfg.experts)
        weight = scores.gather(-1, expert)
        weight = weight / (weight.sum(dim=-1, keepdim=True) + 1e-20)
        load = counts.sum(0)
        if self.training:
            self.load += load
        return weight, expert, load, self.losses(logits, scores, counts, x.shape[1])

    def losses(self, logits, scores, counts, seq):
        """Unequal loads, of each sequence for itself, and large logits."""
        cfg, total = self.cfg, 0.0
        if cfg.aux_loss_coef:
            shares = scores / scores.sum(-1, keepdim=True) if cfg.sigmoid else scores
            means = shares.view(len(counts), seq, -1).mean(1)
            loads = counts * (cfg.experts / (cfg.top_k * seq))
            total = total + cfg.aux_loss_coef * (loads * means).sum(-1).mean()
        if cfg.z_loss_coef:
            total = total + cfg.z_loss_coef * logits.logsumexp(-1).square().mean()
        return total


class Experts(nn.Module):
    """Those of one rank: `local` of them from number `first`."""

    def __init__(self, dim: int, cfg: Mixture, first: int, local: int):
        super().__init__()
        self.first, self.loop = first, cfg.loop
        self.gate_up_proj = nn.Parameter(torch.empty(local, 2 * cfg.width, dim))
        self.down_proj = nn.Parameter(torch.empty(local, dim, cfg.width))

    def product(self, x, weight, counts: list[int]):
        weight = weight.to(x.dtype)
        if self.loop:
            return torch.cat([F.linear(rows, w) for rows, w in zip(x.split(counts), weight.unbind())])
        ends = torch.tensor(counts).cumsum(0).to(torch.int32)
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)

    def forward(self, x, counts: list[int]):
        """The rows of each expert after those of the one before."""
        gate, up = self.product(x, self.gate_up_proj, counts).chunk(2, dim=-1)
        return self.product(F.silu(gate) * up, self.down_proj, counts)


class MoE(nn.Module):
    """With a process group, experts are split over it in contiguous ranges and tokens travel to them and back by
    all-to-all.  What balances is in `balance_loss` after a forward pass."""

    def __init__(self, dim: int, cfg: Mixture, shared: nn.Module | None, ep_group: dist.ProcessGroup | None = None):
        super().__init__()
        self.cfg, self.ep_group = cfg, ep_group
        self.ep_size = ep_group.size() if ep_group else 1
        local = cfg.experts // self.ep_size
        self.gate = Router(dim, cfg)
        self.experts = Experts(dim, cfg, local * (ep_group.rank() if ep_group else 0), local)
        self.shared_experts = shared
        self.balance_loss = 0.0

    def forward(self, x):
        tokens = x.flatten(0, 1)
        weight, expert, counts, self.balance_loss = self.gate(x)
        order = expert.flatten().argsort(stable=True)  # routed copies, grouped by expert
        source = order // self.cfg.top_k
        routed = tokens[source]
        out = self._run_remote(routed, counts) if self.ep_group else self.experts(routed, counts.tolist())
        out = out * weight.flatten()[order, None].to(out.dtype)
        out = torch.zeros_like(tokens, dtype=out.dtype).index_add(0, source, out).view_as(x)
        return out if self.shared_experts is None else out + self.shared_experts(x)

    def _run_remote(self, routed, counts):
        per_rank = counts.view(self.ep_size, -1)
        incoming = torch.empty_like(per_rank)  # [source rank, local expert]
        dist.all_to_all_single(incoming, per_rank, group=self.ep_group)
        send, recv = per_rank.sum(1).tolist(), incoming.sum(1).tolist()

        got = all_to_all_single_autograd(routed, recv, send, self.ep_group)
        out = self.experts(_transpose_blocks(got, incoming), incoming.sum(0).tolist())
        return all_to_all_single_autograd(_transpose_blocks(out, incoming.t()), send, recv, self.ep_group)


def _transpose_blocks(x, sizes):
    """x holds blocks of rows ordered by (i, j) with sizes[i, j] rows each; reorder to (j, i)."""
    rows, cols = sizes.shape
    parts = x.split(sizes.flatten().tolist())
    return torch.cat([parts[i * cols + j] for j in range(cols) for i in range(rows)])


@torch.no_grad()
def rebalance(layers: list[MoE]) -> None:
    """After a step: prefers experts that had less than an equal load of all ranks' tokens."""
    routers = [layer.gate for layer in layers if layer.cfg.bias_update_rate]
    if not routers:
        return
    loads = torch.stack([router.load for router in routers])
    if dist.is_initialized():
        dist.all_reduce(loads)
    for router, load in zip(routers, loads.float()):
        router.e_score_correction_bias += router.cfg.bias_update_rate * (load.mean() - load).sign()
        router.load.zero_()

"""Replicas on N ranks: each computes gradients of its part of the batch, all make the same update."""

from geometry import Box
from style import LARGE, LEFT, RIGHT, SMALL, TOP, Label, Picture

TITLE = ("Data parallelism: the same model on every rank, different samples", "数据并行：每个 rank 上模型相同，样本不同")
DESCRIPTION = (
    "Each of N ranks holds a replica of the parameters and gets its part of the global batch. An all-reduce averages the "
    "gradients, so every rank makes the same update.",
    "N 个 rank 各持有一份参数副本，各处理全局批次的一部分。all-reduce 对梯度求平均，因此每个 rank 做相同的更新。",
)

COLUMN = 200
# Left edges of the ranks; between the second and the last there are others.
RANKS: list[tuple[float, str]] = [(LEFT, "0"), (LEFT + COLUMN + 20, "1"), (RIGHT - COLUMN, "N−1")]
DOTS = (RANKS[1][0] + COLUMN + RANKS[2][0]) / 2


def draw(p: Picture) -> None:
    frames = [p.frame(x, TOP + 92, COLUMN, 324, f"rank {name}") for x, name in RANKS]
    p.text(DOTS, TOP + 170, "…", LARGE)
    average: Label = ("all-reduce: the average of all gradients, on every rank", "all-reduce：所有梯度的平均值，每个 rank 都得到")
    reduced = p.box(LEFT, TOP + 242, RIGHT - LEFT, 34, "communication", average)
    batch(p)
    for frame in frames:
        own_gradients(p, frame, reduced)
        same_update(p, frame, reduced)
    p.text(DOTS, TOP + 348, "…", LARGE)


def batch(p: Picture) -> None:
    p.frame(LEFT, TOP, RIGHT - LEFT, 62, ("global batch", "全局批次"))
    for x, name in RANKS:
        part = p.box(x + 10, TOP + 27, COLUMN - 20, 27, "plain", (f"samples of rank {name}", f"rank {name} 的样本"), SMALL)
        p.arrow(part.bottom, (part.cx, TOP + 122))
    p.text(DOTS, TOP + 40, "…", LARGE)


def own_gradients(p: Picture, frame: Box, reduced: Box) -> None:
    x, w = frame.x + 25, frame.w - 50
    model = p.box(x, frame.y + 30, w, 34, "parameters", ("parameters (replica)", "参数（副本）"))
    gradients = p.box(x, frame.y + 100, w, 30, "gradients", ("own gradients", "自己的梯度"))
    p.arrow(model.bottom, gradients.top, label=("forward,\nbackward", "前向、反向"), side="right")
    p.arrow(gradients.bottom, (frame.cx, reduced.y))


def same_update(p: Picture, frame: Box, reduced: Box) -> None:
    w = (frame.w - 30) / 2
    y = reduced.y1 + 22
    gradients = p.box(frame.x + 10, y, w, 40, "gradients", ("averaged\ngradients", "平均梯度"), SMALL)
    states = p.box(frame.x + 20 + w, y, w, 40, "optimizer", ("optimizer\nstates", "优化器状态"), SMALL)
    p.arrow((gradients.cx, reduced.y1), gradients.top)
    model = p.box(frame.x + 25, y + 70, frame.w - 50, 30, "parameters", ("same parameters", "相同的参数"))
    for source in (gradients, states):
        p.arrow(source.bottom, (source.cx, model.y))
    p.text(frame.cx, y + 54, ("same update", "相同的更新"), SMALL)

"""Between the tensor-parallel parts of a block, each rank keeps some positions only."""

from itertools import pairwise

from geometry import Box
from style import LEFT, SMALL, TOP, Label, Picture

TITLE = ("Sequence parallelism: activations between matrices are split too", "序列并行：矩阵之间的激活也被切分")
DESCRIPTION = (
    "One block on two ranks, twice. With tensor parallelism only, norms and additions work on all positions on both ranks, and "
    "all-reduces follow attention and MLP. With sequence parallelism they work on half of the positions; an all-gather precedes and "
    "a reduce-scatter follows attention and MLP.",
    "两个 rank 上的同一个块，画两遍。只有张量并行时，归一化和残差加法在两个 rank 上都处理全部位置，注意力和 MLP 之后各有一次 all-reduce。"
    "使用序列并行时，它们只处理一半的位置；注意力和 MLP 之前有 all-gather，之后有 reduce-scatter。",
)

NUM_RANKS = 2
ROW, ROW_GAP = 58, 14
GAP = 20
WIDTHS = {"positions": 60, "collective": 26, "layer": 110}

NORM: Label = ("norm", "归一化")
ADD_NORM: Label = ("add, norm", "残差、归一化")
ADD: Label = ("add", "残差")
ATTENTION: Label = ("attention:\nhalf of\nthe heads", "注意力：\n一半的头")
MLP: Label = ("MLP:\nhalf of\nthe features", "MLP：\n一半的特征")
NOTE: Label = (
    "An all-reduce sends as many bytes as a reduce-scatter and an all-gather together. In backward, each all-gather\n"
    "becomes a reduce-scatter, and each reduce-scatter an all-gather.",
    "一次 all-reduce 发送的字节数等于一次 reduce-scatter 加一次 all-gather。反向时 all-gather 变为 reduce-scatter，\n"
    "reduce-scatter 变为 all-gather。",
)


# A column of a block: what it is, and its name.
Column = tuple[str, Label]


def draw(p: Picture) -> None:
    whole: Label = ("all positions\non each rank", "每个 rank 上\n有全部位置")
    half: Label = ("half of the\npositions", "一半的位置")
    p.heading(LEFT, TOP + 6, ("Tensor parallelism only", "只有张量并行"))
    draw_block(p, TOP + 26, block(None, "all-reduce"), 1, whole)
    y = p.bottom() + 30
    p.heading(LEFT, y, ("With sequence parallelism", "加上序列并行"))
    draw_block(p, y + 20, block("all-gather", "reduce-scatter"), NUM_RANKS, half)
    p.note(NOTE)


def block(before: str | None, after: str) -> list[tuple[Column, float]]:
    """The columns of a block and their left edges, with the collectives around its two tensor-parallel layers."""
    layers = [[("collective", before), ("layer", name), ("collective", after)] for name in (ATTENTION, MLP)]
    columns = [("positions", NORM), *layers[0], ("positions", ADD_NORM), *layers[1], ("positions", ADD)]
    x, placed = LEFT + 50, []
    for what, name in columns:
        # Without a collective its place stays empty, so that both blocks line up.
        if name is not None:
            placed.append(((what, name), x))
        x += WIDTHS[what] + GAP
    return placed


def draw_block(p: Picture, y: float, columns: list[tuple[Column, float]], num_parts: int, extent: Label) -> None:
    """A row per rank; activations between the layers are cut into `num_parts`."""
    rows = [y + rank * (ROW + ROW_GAP) for rank in range(NUM_RANKS)]
    bottom = rows[-1] + ROW
    for (what, name), x in columns:
        w = WIDTHS[what]
        if what == "collective":
            p.box(x, y, w, bottom - y, "communication", name, turned=True)
        elif what == "positions":
            p.beside(x + w / 2, bottom + 2, f"{p.say(name)}\n{p.say(extent)}", "below")
        for rank, row in enumerate(rows):
            if what == "layer":
                p.box(x, row, w, ROW, "parameters", name, SMALL)
            elif what == "positions":
                p.slices(Box(x, row, w, ROW), "activations", "y", num_parts, rank % num_parts)
    for rank, row in enumerate(rows):
        p.text(LEFT, row + ROW / 2, f"rank {rank}", SMALL, "start")
        for ((what, _), x), (_, following) in pairwise(columns):
            p.arrow((x + WIDTHS[what] + 1, row + ROW / 2), (following - 1, row + ROW / 2))

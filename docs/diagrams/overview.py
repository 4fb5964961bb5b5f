"""Which dimension of training each strategy splits."""

from collections.abc import Callable

from cube import draw_cube
from geometry import Box
from style import LEFT, SMALL, TOP, Label, Picture

TITLE = ("What each strategy splits over three ranks", "每种策略在三个 rank 之间切分什么")
DESCRIPTION = (
    "Six panels. Of a cube of batch, layers and width, data parallelism splits the batch, pipeline parallelism the layers and tensor "
    "parallelism the width. Context parallelism splits sequences, expert parallelism the experts, ZeRO the states of data-parallel ranks.",
    "六个面板。对于由批次、层和宽度构成的立方体，数据并行切分批次，流水线并行切分层，张量并行切分宽度。"
    "上下文并行切分序列，专家并行切分专家，ZeRO 切分数据并行 rank 的状态。",
)

NUM_RANKS = 3
PANEL_W, PANEL_H, GAP = 230, 232, 15
COLUMN, COLUMN_GAP = 56, 10


def draw(p: Picture) -> None:
    for i, (name, subject, contents) in enumerate(PANELS):
        place = Box(LEFT + i % 3 * (PANEL_W + GAP), TOP + i // 3 * (PANEL_H + GAP), PANEL_W, PANEL_H)
        p.frame(place.x, place.y, place.w, place.h, name)
        p.text(place.x + 10, place.y + 36, subject, SMALL, "start")
        contents(p, place)


def rank_columns(p: Picture, place: Box) -> list[Box]:
    """Where the parts of each rank go, below its name."""
    left = place.x + 28
    columns = [Box(left + rank * (COLUMN + COLUMN_GAP), place.y + 80, COLUMN, 118) for rank in range(NUM_RANKS)]
    for rank, column in enumerate(columns):
        p.text(column.cx, column.y - 14, f"rank {rank}", SMALL)
    return columns


def sequences(p: Picture, place: Box) -> None:
    """Samples downwards, positions to the right."""
    columns = rank_columns(p, place)
    for column in columns:
        for row in column.cut("y", 4):
            for cell in row.cut("x", 3):
                p.fill(cell, "activations")
    p.text(place.x + 16, columns[0].cy, ("samples", "样本"), SMALL, turned=True)
    p.text(columns[1].cx, columns[0].y1 + 14, ("positions", "位置"), SMALL, bold=True)


def experts(p: Picture, place: Box) -> None:
    columns = rank_columns(p, place)
    for rank, column in enumerate(columns):
        for i, part in enumerate(column.cut("y", 2)):
            number = 2 * rank + i
            p.box(part.x, part.y + 4 * i, part.w, part.h - 4, "parameters", (f"expert\n{number}", f"专家\n{number}"), SMALL)
    p.text(columns[1].cx, columns[0].y1 + 14, ("experts of one layer", "一层的专家"), SMALL, bold=True)


def states(p: Picture, place: Box) -> None:
    """Parameters, gradients and optimizer states, drawn as large as they are in mixed precision."""
    columns = rank_columns(p, place)
    for column in columns:
        y = column.y
        for kind, share in [("parameters", 2), ("gradients", 2), ("optimizer", 12)]:
            height = column.h * share / 16
            p.box(column.x, y, column.w, height, kind)
            y += height
    p.text(columns[1].cx, columns[0].y1 + 14, ("states of the model", "模型的状态"), SMALL, bold=True)


def cube(axis: str) -> Callable[[Picture, Box], None]:
    return lambda p, place: draw_cube(p, place, axis, NUM_RANKS)


PANELS: list[tuple[Label, Label, Callable[[Picture, Box], None]]] = [
    (("Data parallelism", "数据并行"), ("splits the batch", "切分批次"), cube("batch")),
    (("Pipeline parallelism", "流水线并行"), ("splits the layers", "切分层"), cube("layers")),
    (("Tensor parallelism", "张量并行"), ("splits the width of every layer", "切分每一层的宽度"), cube("width")),
    (("Context parallelism", "上下文并行"), ("splits every sequence", "切分每个序列"), sequences),
    (("Expert parallelism", "专家并行"), ("splits the experts of a layer", "切分一层的专家"), experts),
    (("ZeRO, FSDP", "ZeRO、FSDP"), ("data parallelism that splits states", "切分状态的数据并行"), states),
]

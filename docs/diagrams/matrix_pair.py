"""A pair of matrices on two ranks, as in Megatron-LM: the first is cut along its outputs, the second along its inputs."""

from itertools import pairwise

from geometry import Box
from style import LEFT, SMALL, Label, Picture

NUM_RANKS = 2
ROW, ROW_GAP, GAP = 80, 14, 24
# What stands in a row, and how wide it is. Matrices are drawn with their inputs downwards and their outputs to the right.
WIDTHS = {"input": 52, "first": 166, "middle": 92, "second": 62, "partial": 52, "all-reduce": 28, "output": 52}
HIDDEN, POSITIONS, FEATURES = 44, 58, 74


def draw_pair(p: Picture, y: float, heading: Label, first: list[str], middle: Label, second: str) -> None:
    """Both ranks below a heading, and the all-reduce that adds up what they compute."""
    p.heading(LEFT, y, heading)
    top = y + 62
    columns = place_columns(top)
    titles: dict[str, Label] = {
        "input": ("input", "输入"),
        "middle": middle,
        "second": second,
        "partial": ("partial sum", "部分和"),
        "output": ("output", "输出"),
    }
    for name, title in titles.items():
        p.text(columns[name].cx, top - 14, title, SMALL)
    for matrix, title in zip(columns["first"].cut("x", len(first)), first):
        p.text(matrix.cx, top - 14, title, SMALL)
    p.text(columns["first"].cx, top - 32, ("cut by columns", "按列切分"), SMALL)
    p.text(columns["second"].cx, top - 32, ("cut by rows", "按行切分"), SMALL)
    p.fill(columns["all-reduce"], "communication", "all-reduce", turned=True)
    for rank in range(NUM_RANKS):
        draw_rank(p, rank, top + rank * (ROW + ROW_GAP) + ROW / 2, columns, len(first))


def place_columns(top: float) -> dict[str, Box]:
    x, columns = LEFT + 52, {}
    for name, width in WIDTHS.items():
        columns[name] = Box(x, top, width, NUM_RANKS * ROW + ROW_GAP)
        x += width + GAP
    return columns


def draw_rank(p: Picture, rank: int, y: float, columns: dict[str, Box], num_first: int) -> None:
    """What one rank holds and computes, around the line at `y`."""

    def part(column: Box, height: float) -> Box:
        return Box(column.x, y - height / 2, column.w, height)

    p.text(LEFT, y, f"rank {rank}", anchor="start")
    for name in ("input", "partial", "output"):
        p.fill(part(columns[name], POSITIONS), "activations")
    for matrix in columns["first"].cut("x", num_first):
        p.slices(part(matrix, HIDDEN).inset(2, 0), "parameters", "x", NUM_RANKS, rank)
    p.slices(part(columns["middle"], POSITIONS), "activations", "x", NUM_RANKS, rank)
    p.slices(part(columns["second"], FEATURES), "parameters", "y", NUM_RANKS, rank)
    for column, following in pairwise(columns.values()):
        p.arrow((column.x1 + 2, y), (following.x - 1, y))

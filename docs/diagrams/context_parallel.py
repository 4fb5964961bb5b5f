"""Two ways to attend to a sequence that ranks have split: a ring, and an exchange of positions for heads."""

from collections.abc import Callable

from geometry import Box
from style import LEFT, RIGHT, SMALL, TOP, Label, Picture

TITLE = ("Context parallelism: four ranks split every sequence", "上下文并行：四个 rank 切分每个序列")
DESCRIPTION = (
    "Left, ring attention: every rank keeps its queries, and keys and values travel from rank to rank until each rank has seen all. "
    "Right, Ulysses: an all-to-all turns the split by position into a split by heads; after attention another one turns it back.",
    "左：环形注意力。每个 rank 保留自己的查询，键和值在 rank 之间依次传递，直到每个 rank 都见过全部键和值。"
    "右：Ulysses。一次 all-to-all 把按位置的切分变为按头的切分；注意力之后再用一次 all-to-all 变回来。",
)

NUM_RANKS = 4
PANEL = 350
CELL = 27
RING_NOTE: Label = (
    "A rank sends its block on before it computes with it.\n"
    "To balance a causal mask, rank r holds chunks r and\n7−r of the sequence's eight.",
    "每个 rank 先把手中的块发给下一个 rank，再用它计算。\n"
    "为了平衡因果掩码的计算量，序列分为八块，\nrank r 持有第 r 块和第 7−r 块。",
)
SPLIT_BY_POSITION: Label = ("split by position", "按位置切分")
SPLIT_BY_HEAD: Label = ("split by heads", "按头切分")
ULYSSES_NOTE: Label = (
    "A cell names the rank that has it; rank 1 is colored.\n"
    "Between the two exchanges, a rank attends to whole\nsequences with its heads.",
    "格中数字为持有它的 rank，rank 1 着色。\n两次交换之间，每个 rank 用自己的头\n对整个序列做注意力。",
)


def draw(p: Picture) -> None:
    ring(p, LEFT, TOP + 6)
    ulysses(p, RIGHT - PANEL, TOP + 6)


def ring(p: Picture, x: float, y: float) -> None:
    p.heading(x, y, ("Ring: keys and values travel", "环形：键和值在 rank 间传递"))
    w, h, right, down = 112, 62, x + PANEL - 122, y + 152
    corners = [(x, y + 22), (right, y + 22), (right, down), (x, down)]
    boxes = [ring_rank(p, rank, Box(*corner, w, h)) for rank, corner in enumerate(corners)]
    hops_between = [
        (boxes[0].right, boxes[1].left, "above"),
        (boxes[1].bottom, boxes[2].top, "left"),
        (boxes[2].left, boxes[3].right, "below"),
        (boxes[3].top, boxes[0].bottom, "right"),
    ]
    for start, end, side in hops_between:
        p.arrow(start, end, label="K, V", side=side)
    p.text((x + right + w) / 2, (y + 22 + down + h) / 2, ("3 hops", "共 3 跳"))
    hops(p, x, down + h + 32)


def ring_rank(p: Picture, rank: int, place: Box) -> Box:
    """A rank with its own queries, keys and values."""
    p.frame(place.x, place.y, place.w, place.h, f"rank {rank}")
    p.box(place.x + 10, place.y + 30, 34, 24, "activations", f"Q{rank}", SMALL)
    p.box(place.x + 50, place.y + 30, 52, 24, "activations", f"K{rank} V{rank}", SMALL)
    return place


def hops(p: Picture, x: float, y: float) -> None:
    """Whose keys and values a rank has in each hop: those of the rank as many positions before it."""
    p.text(x, y, ("rank 1, hops 0 to 3:", "rank 1，第 0 至 3 跳："), SMALL, "start")
    for hop in range(NUM_RANKS):
        owner = (1 - hop) % NUM_RANKS
        p.box(x + 134 + hop * 55, y - 12, 51, 24, "activations", f"K{owner} V{owner}", SMALL)
    p.paragraph(x, y + 24, RING_NOTE)


def ulysses(p: Picture, x: float, y: float) -> None:
    p.heading(x, y, ("Ulysses: positions for heads", "Ulysses：用位置交换头"))
    top = y + 72
    by_position = grid(p, x + 22, top, lambda position, head: position)
    by_head = grid(p, x + PANEL - NUM_RANKS * CELL, top, lambda position, head: head)
    for place, name in [(by_position, SPLIT_BY_POSITION), (by_head, SPLIT_BY_HEAD)]:
        p.text(place.cx, top - 44, name, SMALL, bold=True)
        p.text(place.cx, top - 14, ("heads", "头"), SMALL)
        p.text(place.x - 12, place.cy, ("positions", "位置"), SMALL, turned=True)
    there, back = top + CELL, top + 3 * CELL
    p.arrow((by_position.x1 + 6, there), (by_head.x - 26, there), label=("all-to-all:\nQ, K, V", "all-to-all：\nQ、K、V"))
    p.arrow((by_head.x - 26, back), (by_position.x1 + 6, back), label=("all-to-all:\noutput", "all-to-all：\n输出"), side="below")
    p.paragraph(x, by_position.y1 + 42, ULYSSES_NOTE)


def grid(p: Picture, x: float, y: float, rank_of: Callable[[int, int], int]) -> Box:
    """Positions downwards, heads to the right; each cell names the rank that has it."""
    for position in range(NUM_RANKS):
        for head in range(NUM_RANKS):
            rank = rank_of(position, head)
            p.box(x + head * CELL, y + position * CELL, CELL, CELL, "activations" if rank == 1 else "plain", str(rank), SMALL)
    return Box(x, y, NUM_RANKS * CELL, NUM_RANKS * CELL)

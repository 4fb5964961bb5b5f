"""Which experts each of 8 ranks holds, for four degrees of expert parallelism.

The same as `trainyard mesh CONFIG.toml --world 8 --show` prints: the ranks of dp_shard x cp x tp, arranged again as
efsdp x ep with ep innermost."""

from style import LEFT, RIGHT, SMALL, TOP, Label, Picture

TITLE = ("8 experts on 8 ranks: four ways to arrange them", "8 个 rank 上的 8 个专家：四种排列")
DESCRIPTION = (
    "Four panels, each a table of ranks and the experts that they hold, a grid of ranks as efsdp times ep, and the groups that exchange "
    "tokens and reduce gradients. With ep 1 every rank holds all experts; with ep 8 every rank holds one.",
    "四个面板，每个都有：各 rank 持有哪些专家的表、按 efsdp × ep 排列的 rank 网格，以及交换 token 和归约梯度的通信组。"
    "ep 为 1 时每个 rank 持有全部专家；ep 为 8 时每个 rank 持有一个。",
)

NUM_RANKS = NUM_EXPERTS = 8
PANEL_W, PANEL_H = 352, 296
CELL, ROW = 17, 20
GRID_X, GRID_CELL = 218, 15.5

Groups = list[list[int]]
LAYOUTS: list[tuple[str, int, int]] = [
    ("dp_shard 8, ep 1 × efsdp 8", 1, 1),
    ("dp_shard 8, ep 2 × efsdp 4", 2, 1),
    ("dp_shard 8, ep 8 × efsdp 1", 8, 1),
    ("dp_shard 4 × tp 2, ep 4 × efsdp 2", 4, 2),
]
NOTE: Label = (
    "Ranks in a row of the small grid (ep) hold different experts and exchange tokens. Ranks in a column (efsdp) hold\n"
    "the same experts and reduce their gradients; zero_stage 1 to 3 also shards these experts' states over the column.",
    "小网格中，同一行（ep）的 rank 持有不同的专家，互相交换 token；同一列（efsdp）的 rank 持有相同的专家，一起归约\n"
    "它们的梯度；zero_stage 为 1 到 3 时，这些专家的状态也在同一列中分片。",
)


def draw(p: Picture) -> None:
    p.meanings["parameters"] = ("experts that a rank holds", "rank 持有的专家")
    for i, (heading, ep, tp) in enumerate(LAYOUTS):
        panel(p, LEFT if i % 2 == 0 else RIGHT - PANEL_W, TOP + i // 2 * (PANEL_H + 16), heading, ep, tp)
    p.note(NOTE)


def rows_of(ep: int) -> Groups:
    """The groups along ep: consecutive ranks, because ep is the innermost axis."""
    return [list(range(start, start + ep)) for start in range(0, NUM_RANKS, ep)]


def columns_of(inner: int) -> Groups:
    """The groups of ranks that differ only along the axes outside of an innermost axis of size `inner`."""
    return [list(range(start, NUM_RANKS, inner)) for start in range(inner)]


def panel(p: Picture, x: float, y: float, heading: str, ep: int, tp: int) -> None:
    p.frame(x, y, PANEL_W, PANEL_H, heading)
    holdings(p, x, y + 50, ep)
    mesh(p, x + GRID_X, y + 50, ep)
    lines: list[tuple[Label, Groups]] = [
        (("tokens, all-to-all (ep):", "token 的 all-to-all（ep）："), rows_of(ep)),
        (("expert gradients (efsdp):", "专家梯度（efsdp）："), columns_of(ep)),
        (("other gradients (dp_shard):", "其余梯度（dp_shard）："), columns_of(tp)),
    ]
    if tp > 1:
        lines.append((("tensor parallel (tp):", "张量并行（tp）："), rows_of(tp)))
    for i, (label, groups) in enumerate(lines):
        p.text(x + 10, y + 226 + i * 18, label, SMALL, "start")
        p.text(x + 184, y + 226 + i * 18, written(groups), SMALL, "start")


def written(groups: Groups) -> Label:
    if len(groups[0]) == 1:
        return ("none: each rank alone", "无：各 rank 独自处理")
    if len(groups) == 1:
        return "{0 1 2 3 4 5 6 7}"
    return " ".join("{" + " ".join(map(str, group)) + "}" for group in groups)


def holdings(p: Picture, x: float, y: float, ep: int) -> None:
    """A row per rank: which of the experts it holds."""
    p.text(x + 56 + NUM_EXPERTS * CELL / 2, y - 12, ("experts", "专家"), SMALL)
    each = NUM_EXPERTS // ep
    for rank in range(NUM_RANKS):
        top = y + rank * ROW
        p.text(x + 10, top + CELL / 2, f"rank {rank}", SMALL, "start")
        p.box(x + 56, top, NUM_EXPERTS * CELL, CELL, "plain")
        first = rank % ep * each
        for expert in range(first, first + each):
            p.box(x + 56 + expert * CELL, top, CELL, CELL, "parameters", str(expert), SMALL)


def mesh(p: Picture, x: float, y: float, ep: int) -> None:
    """The ranks as efsdp downwards and ep to the right."""
    p.text(x, y - 12, "efsdp ↓, ep →", SMALL, "start")
    for i, group in enumerate(rows_of(ep)):
        for j, rank in enumerate(group):
            p.box(x + j * GRID_CELL, y + i * ROW, GRID_CELL, CELL, "plain", str(rank), SMALL)

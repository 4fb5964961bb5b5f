"""Tokens travel to their experts and back."""

from geometry import Box
from style import LEFT, RIGHT, SMALL, TOP, Label, Picture

TITLE = ("Expert parallelism: tokens travel to their experts and back", "专家并行：token 发往它的专家，再送回来")
DESCRIPTION = (
    "Two ranks hold two experts each. The router of a rank chooses two experts for each of its tokens. An all-to-all, dispatch, sends "
    "tokens to the ranks of their experts; after the experts another one, combine, sends the outputs back, where they are summed.",
    "两个 rank 各持有两个专家。每个 rank 的路由器为自己的每个 token 选择两个专家。名为“分发”的 all-to-all 把 token 发往专家所在的 rank；"
    "专家计算之后，名为“合并”的 all-to-all 把输出送回并加权求和。",
)

# The tokens of each rank, the experts that each token chose, and the experts of each rank.
TOKENS = ["abc", "def"]
CHOSEN = {"a": (0, 2), "b": (0, 1), "c": (0, 3), "d": (0, 2), "e": (2, 3), "f": (1, 3)}
EXPERTS = [(0, 1), (2, 3)]

FRAME_H, FRAME_GAP = 142, 16
CHIP, CHIP_GAP = 24, 8
SOURCE_W, EXPERT_W, RESULT_W = 112, 206, 104
EXPERTS_X = LEFT + 262
RESULTS_X = RIGHT - RESULT_W
NOTE: Label = (
    "Each token has k = 2 experts. Solid arrows go to another rank, dashed ones stay on their rank. Loads differ:\n"
    "expert 0 has four tokens, expert 1 two.",
    "每个 token 有 k = 2 个专家。实线箭头发往另一个 rank，虚线箭头留在本 rank。负载并不相等：专家 0 有四个 token，\n专家 1 有两个。",
)


def draw(p: Picture) -> None:
    p.meanings["activations"] = ("tokens (activations)", "token（激活）")
    p.meanings["parameters"] = ("routers and experts (parameters)", "路由器和专家（参数）")
    top = TOP + 44
    rows = [top + rank * (FRAME_H + FRAME_GAP) for rank in range(len(TOKENS))]
    sources, arrivals, departures, results = {}, {}, {}, {}
    for rank, y in enumerate(rows):
        sources |= draw_tokens(p, rank, y)
        inputs, outputs = draw_experts(p, rank, y)
        arrivals |= inputs
        departures |= outputs
        results |= draw_results(p, rank, y)
    draw_headings(p)
    for token, chosen in CHOSEN.items():
        for expert in chosen:
            is_local = rank_of_token(token) == rank_of_expert(expert)
            p.arrow(sources[token], arrivals[expert, token], dashed=is_local)
            p.arrow(departures[expert, token], results[token], dashed=is_local)
    p.note(NOTE)


def rank_of_token(token: str) -> int:
    return next(rank for rank, tokens in enumerate(TOKENS) if token in tokens)


def rank_of_expert(expert: int) -> int:
    return next(rank for rank, own in enumerate(EXPERTS) if expert in own)


def draw_headings(p: Picture) -> None:
    columns: list[tuple[float, Label]] = [
        (LEFT + SOURCE_W / 2, ("tokens", "token")),
        ((LEFT + SOURCE_W + EXPERTS_X) / 2, ("dispatch:\nall-to-all", "分发：\nall-to-all")),
        (EXPERTS_X + EXPERT_W / 2, ("experts", "专家")),
        ((EXPERTS_X + EXPERT_W + RESULTS_X) / 2, ("combine:\nall-to-all", "合并：\nall-to-all")),
        (RESULTS_X + RESULT_W / 2, ("weighted sums", "加权和")),
    ]
    for x, label in columns:
        p.text(x, TOP + 18, label, bold=True)


def chip_rows(y: float) -> list[float]:
    """The upper edges of a rank's tokens."""
    return [y + 36 + i * (CHIP + CHIP_GAP) for i in range(3)]


def draw_tokens(p: Picture, rank: int, y: float) -> dict[str, tuple[float, float]]:
    """A rank's tokens and its router; gives the points from which tokens leave."""
    p.frame(LEFT, y, SOURCE_W, FRAME_H, f"rank {rank}")
    router = p.box(LEFT + 66, y + 34, 30, FRAME_H - 46, "parameters", ("router", "路由器"), turned=True)
    points = {}
    for token, row in zip(TOKENS[rank], chip_rows(y)):
        chip = p.box(LEFT + 14, row, CHIP, CHIP, "activations", token, SMALL)
        p.arrow(chip.right, (router.x, chip.cy))
        points[token] = (router.x1, chip.cy)
    return points


def draw_experts(p: Picture, rank: int, y: float) -> tuple[dict, dict]:
    """A rank's experts with the tokens that they get; gives the points where tokens arrive and leave."""
    p.frame(EXPERTS_X, y, EXPERT_W, FRAME_H, f"rank {rank}")
    arrivals, departures = {}, {}
    for i, expert in enumerate(EXPERTS[rank]):
        box = p.box(EXPERTS_X + 12, y + 32 + i * 52, EXPERT_W - 24, 44, "parameters")
        p.text(box.x + 8, box.cy, (f"expert {expert}", f"专家 {expert}"), SMALL, "start")
        tokens = [token for token, chosen in CHOSEN.items() if expert in chosen]
        for j, token in enumerate(tokens):
            p.box(box.x + 70 + j * 27, box.cy - 11, 22, 22, "activations", token, SMALL)
            height = box.y + (j + 1) * box.h / (len(tokens) + 1)
            arrivals[expert, token] = (box.x, height)
            departures[expert, token] = (box.x1, height)
    return arrivals, departures


def draw_results(p: Picture, rank: int, y: float) -> dict[str, tuple[float, float]]:
    p.frame(RESULTS_X, y, RESULT_W, FRAME_H, f"rank {rank}")
    chips = [Box(RESULTS_X + (RESULT_W - CHIP) / 2, row, CHIP, CHIP) for row in chip_rows(y)]
    for token, chip in zip(TOKENS[rank], chips):
        p.fill(chip, "activations", token, SMALL)
    return {token: chip.left for token, chip in zip(TOKENS[rank], chips)}

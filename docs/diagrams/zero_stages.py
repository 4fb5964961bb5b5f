"""What each rank holds with DDP and with ZeRO 1, 2 and 3, and what it sends."""

from geometry import Box
from style import LEFT, RIGHT, SMALL, TOP, Label, Picture

TITLE = ("What each of N = 4 ranks holds: bytes per parameter", "N = 4 个 rank 各自持有什么：每个参数的字节数")
DESCRIPTION = (
    "Four panels for mixed precision with AdamW: parameters and gradients in bf16, 2 bytes each; master weights and two moments in "
    "fp32, 12 bytes. DDP holds 16 bytes per parameter, ZeRO 1 4+12/N, ZeRO 2 2+14/N, ZeRO 3 16/N. Each panel also says what is sent.",
    "四个面板，混合精度与 AdamW：bf16 的参数和梯度各 2 字节，fp32 的主权重和两个动量共 12 字节。每个参数 DDP 占 16 字节，"
    "ZeRO 1 占 4+12/N，ZeRO 2 占 2+14/N，ZeRO 3 占 16/N。每个面板还列出发送的内容。",
)

NUM_RANKS = 4
STATES = [("parameters", 2), ("gradients", 2), ("optimizer", 12)]
BYTE = 16
GAP = 10
PANEL_W, PANEL_H = 352, 214
ROW, BAR = 25, 19

ALL_REDUCE: Label = ("sends: all-reduce of gradients (2P)", "发送：梯度 all-reduce（2P）")
SCATTER_GATHER: Label = (
    "sends: reduce-scatter of gradients (P),\nall-gather of new parameters (P)",
    "发送：梯度 reduce-scatter（P），\n新参数 all-gather（P）",
)
GATHER_TWICE: Label = (
    "sends: reduce-scatter of gradients (P), all-gather\nof parameters in forward and in backward (2P)",
    "发送：梯度 reduce-scatter（P），\n前向和反向各一次参数 all-gather（2P）",
)
# Name, number of states that are sharded (counted from the last), bytes per parameter, what is sent.
STAGES: list[tuple[str, int, str, Label]] = [
    ("DDP", 0, "2 + 2 + 12 = 16", ALL_REDUCE),
    ("ZeRO 1", 1, "4 + 12/N = 7", SCATTER_GATHER),
    ("ZeRO 2", 2, "2 + 14/N = 5.5", SCATTER_GATHER),
    ("ZeRO 3 (FSDP)", 3, "16/N = 4", GATHER_TWICE),
]
FOOTNOTE: Label = (
    "bf16 parameters and gradients; optimizer states: fp32 master weights and two moments. Sent: elements per step\n"
    "of one micro-batch, times (N−1)/N; P parameters. Trainyard's Ddp holds all in fp32: 4 + 4 + 8, also 16.",
    "参数和梯度为 bf16；优化器状态为 fp32 的主权重和两个动量。发送量：每步一个微批次时的元素数，再乘以 (N−1)/N；\n"
    "P 为参数个数。Trainyard 的 Ddp 全部用 fp32 保存：4 + 4 + 8，也是 16。",
)


def draw(p: Picture) -> None:
    for i, stage in enumerate(STAGES):
        x = LEFT if i % 2 == 0 else RIGHT - PANEL_W
        panel(p, x, TOP + i // 2 * (PANEL_H + 16), *stage)
    p.note(FOOTNOTE)


def panel(p: Picture, x: float, y: float, name: str, num_sharded: int, total: str, sent: Label) -> None:
    p.frame(x, y, PANEL_W, PANEL_H, name)
    p.text(x + PANEL_W - 10, y + 15, (f"{total} bytes", f"{total} 字节"), anchor="end", bold=True)
    left = x + 58
    for i, (kind, size) in enumerate(STATES):
        is_sharded = i >= len(STATES) - num_sharded
        p.text(left + size * BYTE / 2, y + 42, f"{size}/N" if is_sharded else str(size), SMALL)
        for rank in range(NUM_RANKS):
            place = Box(left, y + 54 + rank * ROW, size * BYTE, BAR)
            p.slices(place, kind, "x", NUM_RANKS if is_sharded else 1, rank if is_sharded else 0)
        left += size * BYTE + GAP
    for rank in range(NUM_RANKS):
        p.text(x + 10, y + 54 + rank * ROW + BAR / 2, f"rank {rank}", SMALL, "start")
    p.paragraph(x + 10, y + PANEL_H - 50, sent)

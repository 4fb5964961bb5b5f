"""Buckets of gradients are reduced while backward continues with earlier layers."""

from style import LEFT, SMALL, TOP, Label, Picture
from timeline import Lanes

TITLE = ("Ddp: all-reduces of buckets overlap backward", "Ddp：桶的 all-reduce 与反向重叠")
DESCRIPTION = (
    "Two timelines. Without overlap, gradients are reduced after backward of layers 4 to 1. With buckets, each bucket is "
    "reduced as soon as it is full, the small first one early; only the last all-reduce is exposed after backward.",
    "两条时间线。不重叠时，第 4 层到第 1 层的反向全部结束后才归约梯度。使用桶时，每个桶装满后立即归约，较小的第一个桶很早就开始；"
    "反向结束后只有最后一次 all-reduce 是暴露的。",
)

NUM_LAYERS = 4
# When each bucket is full, in units of one layer's backward. The first one is small.
FULL = [0.4, 1.6, 2.8, NUM_LAYERS]
# Duration of the all-reduce of what one layer's backward computes, and of the optimizer's step.
REDUCE, STEP = 0.6, 0.7
WITHOUT_OVERLAP = NUM_LAYERS * (1 + REDUCE)
UNIT = 84
X = LEFT + 110
COMPUTE, SEND = 0, 1


def all_reduces() -> list[tuple[float, float]]:
    """When the all-reduce of each bucket begins and ends: one after the other, each once its bucket is full."""
    spans, free, begin = [], 0.0, 0.0
    for full in FULL:
        start = max(full, free)
        free = start + REDUCE * (full - begin)
        spans.append((start, free))
        begin = full
    return spans


def draw(p: Picture) -> None:
    p.meanings["gradients"] = ("backward: computes gradients", "反向：计算梯度")
    p.meanings["optimizer"] = ("optimizer step", "优化器更新")
    after_backward(p, TOP)
    during_backward(p, TOP + 128)


def lanes_of(p: Picture, y: float, heading: Label, sent: Label, gap: float) -> Lanes:
    p.heading(LEFT, y + 6, heading)
    lanes = Lanes(p, X, y + 24, UNIT, [("compute", "计算"), sent], gap=gap)
    for i in range(NUM_LAYERS):
        lanes.span(COMPUTE, i, i + 1, "gradients", (f"layer {NUM_LAYERS - i}", f"第 {NUM_LAYERS - i} 层"))
    return lanes


def finish(lanes: Lanes, end: float) -> None:
    """The rank waits for the rest of the communication, then updates the parameters."""
    lanes.span(COMPUTE, NUM_LAYERS, end, "idle")
    lanes.span(COMPUTE, end, end + STEP, "optimizer", ("step", "更新"))


def after_backward(p: Picture, y: float) -> None:
    lanes = lanes_of(p, y, ("One all-reduce after backward", "反向之后做一次 all-reduce"), "all-reduce", gap=10)
    lanes.span(SEND, NUM_LAYERS, WITHOUT_OVERLAP, "communication", ("all gradients", "全部梯度"))
    finish(lanes, WITHOUT_OVERLAP)


def during_backward(p: Picture, y: float) -> None:
    sent: Label = ("all-reduce\nof buckets", "各桶的\nall-reduce")
    lanes = lanes_of(p, y, ("Buckets, reduced during backward", "分桶，在反向期间归约"), sent, gap=34)
    spans = all_reduces()
    for i, (full, (start, end)) in enumerate(zip(FULL, spans)):
        bucket = lanes.span(SEND, start, end, "communication", str(i + 1))
        p.arrow((lanes.at(full), lanes.row(COMPUTE) + lanes.height), (lanes.at(full), bucket.y))
    end = spans[-1][1]
    finish(lanes, end)
    remarks(p, lanes, spans[0], end)


def remarks(p: Picture, lanes: Lanes, first: tuple[float, float], end: float) -> None:
    """Names what matters: when a bucket is sent, how early the first one is, what is exposed, and what is gained."""
    p.text(lanes.at(FULL[1]) + 8, lanes.row(SEND) - lanes.gap / 2, ("bucket 2 full", "桶 2 已满"), SMALL, "start")
    early: Label = ("small first bucket: communication starts early", "第一个桶较小：通信很早就开始")
    x = lanes.at(sum(first) / 2)
    p.arrow((x, lanes.end + 24), (x, lanes.end + 3))
    p.text(x - 12, lanes.end + 36, early, SMALL, "start")
    p.bracket(lanes.at(NUM_LAYERS), lanes.at(end), lanes.end + 14, ("exposed tail", "暴露的通信"))
    middle = lanes.row(COMPUTE) + lanes.height / 2
    saved = (lanes.at(end + STEP) + 4, middle), (lanes.at(WITHOUT_OVERLAP + STEP), middle)
    p.arrow(*saved, both=True, label=("time saved", "节省的时间"))

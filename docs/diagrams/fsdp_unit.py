"""The life of one unit in a step of fully sharded training."""

from style import LEFT, NORMAL, SMALL, TOP, Label, Picture
from timeline import Lanes

TITLE = ("ZeRO 3 (FSDP): the life of unit i in one step", "ZeRO 3（FSDP）：单元 i 在一步中的经历")
DESCRIPTION = (
    "Computation, communication and memory over time. Unit i is sharded; it is gathered while the previous unit computes, "
    "runs forward, and is resharded. In backward it is gathered again, its gradients overwrite its parameters, they are "
    "reduce-scattered while the next unit computes, and the optimizer updates the shard.",
    "计算、通信和内存随时间的变化。单元 i 平时是分片的；上一个单元计算时聚合它的参数，前向之后重新分片。反向时再次聚合，"
    "梯度覆盖参数，在下一个单元计算时做 reduce-scatter，最后优化器更新分片。",
)

UNIT = 63
X = LEFT + 110
COMPUTE, GATHER, SCATTER, MEMORY = range(4)
LANES: list[Label] = [("compute", "计算"), "all-gather", "reduce-scatter", ("unit i\nin memory", "内存中的\n单元 i")]

# When each unit computes. Units after i+1 run between forward and backward, those before i−1 at both ends.
FORWARD = {"i−1": (0.6, 1.6), "i": (1.6, 2.6), "i+1": (2.6, 3.6)}
BACKWARD = {"i+1": (4.2, 5.4), "i": (5.4, 6.6), "i−1": (6.6, 7.8)}
STEP = (8.4, 9.3)
END = 9.6
PAUSES = [0.3, 3.9, 8.1]

# When unit i is gathered: while its neighbor computes. Its gradients are reduced while the next one computes.
UNSHARDS = [(0.7, 1.5), (4.3, 5.2)]
REDUCED = (6.7, 7.6)
OTHERS = [(GATHER, 1.7, 2.5, "i+1"), (GATHER, 5.5, 6.4, "i−1"), (SCATTER, 5.5, 6.4, "i+1")]
SHARD = 9

# What happens to the unit, in order, and when.
EVENTS: list[tuple[float, Label]] = [
    (0.3, ("sharded: each rank holds 1/N", "分片：每个 rank 持有 1/N")),
    (1.1, ("unshard (all-gather) while unit i−1 computes", "单元 i−1 计算时聚合参数（unshard）")),
    (2.1, ("forward with whole parameters", "用完整的参数做前向")),
    (2.9, ("reshard: free the gathered memory", "重新分片（reshard）：释放聚合的内存")),
    (4.8, ("unshard again while unit i+1 computes", "单元 i+1 计算时再次聚合参数")),
    (5.9, ("backward; gradients overwrite parameters", "反向；梯度覆盖参数")),
    (7.1, ("reduce-scatter while unit i−1 computes", "单元 i−1 计算时做 reduce-scatter")),
    (8.85, ("the optimizer updates the shard", "优化器更新分片")),
]


def draw(p: Picture) -> None:
    p.meanings["activations"] = ("forward", "前向")
    p.meanings["gradients"] = ("backward, gradients", "反向、梯度")
    p.meanings["optimizer"] = ("optimizer step", "优化器更新")
    p.meanings["plain"] = ("other units", "其他单元")
    lanes = Lanes(p, X, TOP + 20, UNIT, LANES, height=32, gap=8)
    computation(p, lanes)
    communication(lanes)
    memory(p, lanes)
    events(p, lanes)


def computation(p: Picture, lanes: Lanes) -> None:
    for heading, units, kind in [(("forward", "前向"), FORWARD, "activations"), (("backward", "反向"), BACKWARD, "gradients")]:
        for name, (start, end) in units.items():
            lanes.span(COMPUTE, start, end, kind if name == "i" else "plain", name, NORMAL)
        times = [time for span in units.values() for time in span]
        p.text(lanes.at((min(times) + max(times)) / 2), lanes.y - 12, heading)
    for time in PAUSES:
        p.text(lanes.at(time), lanes.row(COMPUTE) + lanes.height / 2, "…")
    lanes.span(COMPUTE, *STEP, "optimizer", ("step", "更新"), NORMAL)


def communication(lanes: Lanes) -> None:
    for lane, start, end, name in OTHERS:
        lanes.span(lane, start, end, "plain", name, NORMAL)
    for start, end in UNSHARDS:
        lanes.span(GATHER, start, end, "communication", "i", NORMAL)
    lanes.span(SCATTER, *REDUCED, "communication", "i", NORMAL)


def memory(p: Picture, lanes: Lanes) -> None:
    """The shard is always there; the whole unit only from its unshard until it has been used."""
    floor = lanes.row(MEMORY) + lanes.height

    def bar(start: float, end: float, height: float, kind: str, label: Label | None = None, lift: float = 0) -> None:
        p.box(lanes.at(start), floor - lift - height, (end - start) * UNIT, height, kind, label, SMALL)

    whole = lanes.height - SHARD
    forward, backward = FORWARD["i"], BACKWARD["i"]
    bar(0, END, SHARD, "parameters")
    bar(UNSHARDS[0][0], forward[1], whole, "parameters", ("whole", "完整"), SHARD)
    bar(UNSHARDS[1][0], backward[0] + 0.4, whole, "parameters", ("whole", "完整"), SHARD)
    bar(backward[0] + 0.4, REDUCED[1], whole, "gradients", ("whole gradients", "完整的梯度"), SHARD)
    bar(REDUCED[1], STEP[1], SHARD, "gradients", lift=SHARD)


def events(p: Picture, lanes: Lanes) -> None:
    y = lanes.end + 14
    for i, (time, label) in enumerate(EVENTS):
        p.badge(lanes.at(time), y, i + 1)
        row, column = i % 4, i // 4
        x = LEFT + 8 + column * 370
        p.badge(x, y + 36 + row * 24, i + 1)
        p.text(x + 16, y + 36 + row * 24, label, SMALL, "start")

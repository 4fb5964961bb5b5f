"""Workers that wait for each other, and workers that do not."""

import math
from itertools import pairwise

from style import LEFT, RIGHT, TOP, Label, Picture
from timeline import Lanes

TITLE = ("Synchronous and asynchronous data parallelism", "同步与异步数据并行")
DESCRIPTION = (
    "Above, synchronous training: three workers of different speed wait for the slowest, then all-reduce and update together. Below, "
    "asynchronous training: each worker sends its gradients to a parameter server and continues at once with the newest parameters, "
    "so gradients of old parameters are applied to newer ones. Asynchronous training is not built in Trainyard yet.",
    "上：同步训练。三个快慢不同的工作进程等待最慢的一个，然后一起 all-reduce 并更新。下：异步训练。每个工作进程把梯度发给参数服务器，"
    "立即用最新的参数继续，因此旧参数的梯度会用到更新的参数上。Trainyard 尚未实现异步训练。",
)

# Time that each worker takes for the gradients of a batch, and time of the all-reduce.
WORKERS = [2.0, 2.8, 4.5]
REDUCE = 0.5
END = 2 * (max(WORKERS) + REDUCE)
UNIT = 60
X = LEFT + 118
NAMES: list[Label] = [(f"worker {i}", f"工作进程 {i}") for i in range(len(WORKERS))]


def starts(worker: int) -> list[float]:
    """When a worker begins with a batch, if it never waits."""
    time = WORKERS[worker]
    return [time * i for i in range(math.ceil(END / time))]


def pushes() -> list[tuple[float, int]]:
    """When each worker sends gradients, in the order of time."""
    return sorted((time, worker) for worker in range(len(WORKERS)) for time in starts(worker)[1:])


def version_at(time: float) -> int:
    """The number of updates that the server has made up to and including `time`."""
    return sum(sent <= time for sent, _ in pushes())


# How many updates the server makes while the slowest worker computes its first gradients.
STALE = version_at(max(WORKERS)) - 1


NOTE: Label = (
    "A box names the version of the parameters that a worker computes with. Worker 2 starts with v0; when its gradients\n"
    f"arrive, the server has v{STALE}: they are {STALE} updates old. Each arrow: gradients to the server, newest parameters back.",
    f"方框中是工作进程计算时所用的参数版本。工作进程 2 从 v0 开始；它的梯度到达时，服务器上已是 v{STALE}：\n"
    f"梯度过时了 {STALE} 次更新。每个箭头：梯度发往服务器，最新的参数送回。",
)


def draw(p: Picture) -> None:
    p.meanings["gradients"] = ("computing gradients", "计算梯度")
    p.meanings["parameters"] = ("versions of the parameters", "参数的各个版本")
    p.meanings["idle"] = ("waiting", "等待")
    synchronous(p, TOP + 6)
    asynchronous(p, p.bottom() + 34)


def synchronous(p: Picture, y: float) -> None:
    p.text(
        LEFT, y, ("Synchronous: all wait, all have the same parameters", "同步：互相等待，参数相同"), anchor="start", bold=True
    )
    lanes = Lanes(p, X, y + 20, UNIT, NAMES, height=26, gap=8)
    for step in range(2):
        start = step * END / 2
        wait_until = start + max(WORKERS)
        for lane, time in enumerate(WORKERS):
            lanes.span(lane, start, start + time, "gradients", f"v{step}")
            if start + time < wait_until:
                lanes.span(lane, start + time, wait_until, "idle")
        p.box(lanes.at(wait_until), lanes.y, REDUCE * UNIT, lanes.end - lanes.y, "communication", "all-reduce", turned=True)


def asynchronous(p: Picture, y: float) -> None:
    p.text(
        LEFT, y, ("Asynchronous: no worker waits, gradients are stale", "异步：互不等待，梯度是过时的"), anchor="start", bold=True
    )
    p.box(RIGHT - 214, y - 13, 214, 26, "plain", ("not built in Trainyard yet", "Trainyard 尚未实现"), bold=True, dashed=True)
    lanes = Lanes(p, X, y + 24, UNIT, [*NAMES, ("parameter server", "参数服务器")], height=26, gap=14)
    server = len(WORKERS)
    # Boxes are drawn over the arrows, so that an arrow shows only between lanes.
    for time, worker in pushes():
        p.arrow((lanes.at(time), lanes.row(worker) + lanes.height), (lanes.at(time), lanes.row(server)))
    for worker in range(len(WORKERS)):
        for start, end in pairwise([*starts(worker), END]):
            lanes.span(worker, start, end, "gradients", f"v{version_at(start)}")
    times = [0.0, *(time for time, _ in pushes()), END]
    for version, (start, end) in enumerate(pairwise(times)):
        lanes.span(server, start, end, "parameters", f"v{version}")
    p.note(NOTE)

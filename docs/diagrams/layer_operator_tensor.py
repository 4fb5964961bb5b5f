"""Three ways to place the parts of a model on devices."""

from collections.abc import Callable

from geometry import Box
from style import LEFT, SHADES, SMALL, TOP, Label, Picture

TITLE = ("Who holds what: layers, operators or slices", "谁持有什么：层、算子，还是切片")
DESCRIPTION = (
    "Three panels with the same model of three layers, each with operators Q, K and V, on three devices. Layer-wise, a device has whole "
    "layers. Operator-wise, a device has one operator of every layer. Tensor parallel, a device has a slice of every operator.",
    "三个面板，同一个三层模型，每层有算子 Q、K、V，放在三个设备上。按层：每个设备有完整的层。按算子：每个设备有每一层的一个算子。"
    "张量并行：每个设备有每个算子的一个切片。",
)

NUM = 3
OPERATORS = "QKV"
PANEL, GAP = 228, 18
LABELS = 50
BOX_W, BOX_H, BOX_GAP = 54, 36, 8
ROW = 88

# The devices that have the slices of an operator, given the numbers of its layer and of the operator.
Placement = Callable[[int, int], list[int]]

PANELS: list[tuple[Label, Placement, Label, Label]] = [
    (
        ("Layer-wise", "按层"),
        lambda layer, operator: [layer],
        ("send activations", "发送激活"),
        (
            "One device computes at a time,\nunless a pipeline of micro-\nbatches keeps all busy (pp).",
            "同一时刻只有一个设备在计算，\n除非用微批次的流水线\n让所有设备都忙（pp）。",
        ),
    ),
    (
        ("Operator-wise", "按算子"),
        lambda layer, operator: [operator],
        ("exchange outputs", "交换输出"),
        (
            "Devices compute different\noperators at the same time,\nsuch as experts (ep).",
            "各设备同时计算不同的算子，\n例如不同的专家（ep）。",
        ),
    ),
    (
        ("Tensor parallel", "张量并行"),
        lambda layer, operator: list(range(NUM)),
        "all-reduce",
        ("Devices compute slices of the\nsame operator at the same\ntime (tp).", "各设备同时计算\n同一个算子的不同切片（tp）。"),
    ),
]


def draw(p: Picture) -> None:
    p.meanings["parameters"] = ("parameters; the number is their device", "参数；数字为所在的设备")
    for i, (heading, devices, sent, note) in enumerate(PANELS):
        panel(p, LEFT + i * (PANEL + GAP), heading, devices, sent, note)


def panel(p: Picture, x: float, heading: Label, devices: Placement, sent: Label, note: Label) -> None:
    p.heading(x, TOP + 6, heading)
    top, left = TOP + 50, x + LABELS
    width = NUM * (BOX_W + BOX_GAP) - BOX_GAP
    for i, name in enumerate(OPERATORS):
        p.text(left + i * (BOX_W + BOX_GAP) + BOX_W / 2, top - 14, name)
    for layer in range(NUM):
        y = top + layer * ROW
        p.text(x, y + BOX_H / 2, (f"layer {layer}", f"第 {layer} 层"), SMALL, "start")
        for i in range(NUM):
            operator(p, Box(left + i * (BOX_W + BOX_GAP), y, BOX_W, BOX_H), devices(layer, i))
        if layer + 1 < NUM:
            exchange(p, Box(left, y + BOX_H, width, ROW - BOX_H), sent)
    p.paragraph(x, top + NUM * ROW - 32, note)


def operator(p: Picture, place: Box, devices: list[int]) -> None:
    for part, device in zip(place.cut("x", len(devices)), devices):
        p.fill(part, "parameters", str(device), SMALL, color=SHADES[device])


def exchange(p: Picture, place: Box, sent: Label) -> None:
    """What is sent between two layers."""
    bar = p.box(place.x, place.y + 15, place.w, 22, "communication", sent, SMALL)
    p.arrow(place.top, bar.top)
    p.arrow(bar.bottom, place.bottom)

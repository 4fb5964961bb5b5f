"""A cube of batch, layers and width, seen from the front, the right and above, and cut along one of them."""

from dataclasses import dataclass

from geometry import Box, Point
from style import SMALL, Label, Picture

# Width and height of the front, and the way to the back.
W, H = 88, 88
BACK: Point = (45, -36)
# The distance between two parts, as a share of the cube.
APART = {"width": 0.12, "layers": 0.14, "batch": 0.3}
NAMES: dict[str, Label] = {"width": ("width", "宽度"), "layers": ("layers", "层"), "batch": ("batch", "批次")}
# The batch is divided without dividing parameters.
KIND = {"width": "parameters", "layers": "parameters", "batch": "activations"}


@dataclass(frozen=True)
class Part:
    """An interval along each of width (to the right), layers (downwards) and batch (to the back)."""

    width: tuple[float, float] = (0, 1)
    layers: tuple[float, float] = (0, 1)
    batch: tuple[float, float] = (0, 1)


def parts(axis: str, num: int) -> list[Part]:
    step = 1 / num + APART[axis]
    return [Part(**{axis: (i * step, i * step + 1 / num)}) for i in range(num)]


def draw_cube(p: Picture, place: Box, axis: str, num: int) -> None:
    """The parts of `num` ranks along `axis`, and the names of all axes, with that one in bold."""
    spread = {name: 1 + (num - 1) * APART[name] * (name == axis) for name in NAMES}
    front: Point = (place.x + 36, place.y1 - 32 - H * spread["layers"])

    def at(width: float, layers: float, batch: float) -> Point:
        return (front[0] + width * W + batch * BACK[0], front[1] + layers * H + batch * BACK[1])

    # Parts that are further away are drawn first: the last ones to the back and down, the first ones to the left.
    ranked = list(enumerate(parts(axis, num)))
    for rank, part in ranked if axis == "width" else reversed(ranked):
        draw_part(p, part, KIND[axis], at)
        label_rank(p, part, axis, rank, at)
    for name, x, y, turned in [
        ("width", *at(spread["width"] / 2, spread["layers"], 0), False),
        ("layers", *at(0, spread["layers"] / 2, 0), True),
        ("batch", *at(0, 0, spread["batch"] / 2), False),
    ]:
        dx, dy, anchor = {"width": (0, 14, "middle"), "layers": (-14, 0, "middle"), "batch": (-8, -6, "end")}[name]
        p.text(x + dx, y + dy, NAMES[name], SMALL, anchor, bold=name == axis, turned=turned)


def draw_part(p: Picture, part: Part, kind: str, at) -> None:
    (u0, u1), (v0, v1), (t0, t1) = part.width, part.layers, part.batch
    p.polygon([at(u0, v0, t0), at(u1, v0, t0), at(u1, v1, t0), at(u0, v1, t0)], kind)
    p.polygon([at(u0, v0, t0), at(u1, v0, t0), at(u1, v0, t1), at(u0, v0, t1)], kind, shade=-0.35)
    p.polygon([at(u1, v0, t0), at(u1, v1, t0), at(u1, v1, t1), at(u1, v0, t1)], kind, shade=0.12)


def label_rank(p: Picture, part: Part, axis: str, rank: int, at) -> None:
    """On the front of a part, or beside it where other parts hide the front."""
    if axis == "batch":
        x, y = at(1, 1, part.batch[0])
        p.text(x + 6, y + 5, f"rank {rank}", SMALL, "start")
    else:
        x, y = at(sum(part.width) / 2, sum(part.layers) / 2, 0)
        p.text(x, y, f"rank {rank}", SMALL, turned=axis == "width")

"""The one place of colors, fonts and spacing: a canvas with boxes, text, arrows and a legend."""

import unicodedata
from dataclasses import dataclass
from itertools import pairwise
from xml.sax.saxutils import escape

import overlaps
from geometry import Box, Point

ENGLISH, CHINESE = 0, 1

# A label is a pair (English, Chinese), or one string that reads the same in both.
Label = str | tuple[str, str]

WIDTH = 760
MARGIN = 20
LEFT, RIGHT = MARGIN, WIDTH - MARGIN
# Where the content of a picture begins, below its heading.
TOP = 58
PADDING = 4

SMALL, NORMAL, LARGE = 12, 13, 15
LINE = 1.35
FONTS = "system-ui, 'Noto Sans CJK SC', sans-serif"

INK, LINE_COLOR, FRAME_COLOR = "#222", "#444", "#8a8a82"
CARD, CARD_BORDER = "#fafaf7", "#d8d8d0"


@dataclass(frozen=True)
class Kind:
    fill: str
    stroke: str
    meaning: Label | None = None


# Each color has one meaning in all pictures. The hues are those of Okabe and Ito, which color-blind readers can tell
# apart; fills are pale, so that the same dark text is legible on all of them.
KINDS = {
    "parameters": Kind("#bcdcf2", "#0072b2", ("parameters", "参数")),
    "activations": Kind("#ecd0e4", "#a3468a", ("activations", "激活")),
    "gradients": Kind("#ffdca3", "#c97a00", ("gradients", "梯度")),
    "optimizer": Kind("#aee3d0", "#00805b", ("optimizer states", "优化器状态")),
    "communication": Kind("#d2d2ce", "#444", ("communication", "通信")),
    "idle": Kind("url(#hatch)", "#b4b4ac", ("idle", "空闲")),
    "elsewhere": Kind("none", "#9a9a92", ("on other ranks", "在其他 rank 上")),
    "plain": Kind("#fff", FRAME_COLOR),
}

# Parameters of different devices, where a picture is about who holds them.
SHADES = ["#e2f0fa", "#a9d2ee", "#6bb1de"]

DEFINITIONS = (
    '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto-start-reverse">'
    f'<path d="M0 0 8 4 0 8z" fill="{LINE_COLOR}"/></marker>'
    '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="6" height="6" fill="#f4f4f0"/><path d="M0 0V6" stroke="#c4c4bc" stroke-width="2"/></pattern></defs>'
)


def number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def is_wide(c: str) -> bool:
    return unicodedata.east_asian_width(c) in "WF"


def character_width(c: str) -> float:
    """In em, about that of DejaVu Sans, the widest of the usual fonts."""
    if is_wide(c):
        return 1.0
    if c in "ijlftr.,:;'|!()[]{} /·":
        return 0.4
    if c in "mwMW%+−=→×…":
        return 0.85
    return 0.7 if c.isupper() else 0.6


def text_width(text: str, size: float, bold: bool = False) -> float:
    return size * sum(map(character_width, text)) * (1.08 if bold else 1)


class Picture:
    """One picture in one language. Content is placed below the heading; the legend follows by itself."""

    def __init__(self, title: Label, description: Label, language: int):
        self.language = language
        self.title, self.description = self.say(title), self.say(description)
        self.svg: list[str] = []
        self.shapes: list[overlaps.Shape] = []
        self.meanings: dict[str, Label] = {name: kind.meaning for name, kind in KINDS.items() if kind.meaning}
        self.used: set[str] = set()
        self.text(LEFT, 31, title, LARGE, "start", bold=True)

    def say(self, label: Label) -> str:
        return label if isinstance(label, str) else label[self.language]

    # Text.

    def text(
        self,
        x: float,
        y: float,
        label: Label,
        size: int = NORMAL,
        anchor: str = "middle",
        bold: bool = False,
        turned: bool = False,
    ) -> Box:
        """Lines of text whose block is centered vertically at `y`; `turned` runs along the y axis, around `(x, y)`."""
        lines = self.say(label).split("\n")
        if turned and any(map(is_wide, self.say(label))):
            # Chinese is written downwards, not turned.
            lines, turned = list(self.say(label)), False
        width = max(text_width(line, size, bold) for line in lines)
        height = size * LINE * len(lines)
        weight = ' font-weight="bold"' if bold else ""
        turn = f' transform="rotate(-90 {number(x)} {number(y)})"' if turned else ""
        for i, line in enumerate(lines):
            baseline = y + (i - (len(lines) - 1) / 2) * size * LINE + size * 0.35
            style = f'font-size="{size}" text-anchor="{anchor}"{weight}{turn}'
            self.svg.append(f'<text x="{number(x)}" y="{number(baseline)}" {style}>{escape(line)}</text>')
        left = x - {"start": 0, "middle": width / 2, "end": width}[anchor]
        place = Box(left, y - height / 2, width, height)
        if turned:
            place = Box(x - height / 2, y - width / 2, height, width)
        self.shapes.append(overlaps.Shape("text", place, self.say(label)))
        return place

    def heading(self, x: float, y: float, label: Label) -> None:
        self.text(x, y, label, anchor="start", bold=True)

    def paragraph(self, x: float, top: float, label: Label) -> None:
        height = SMALL * LINE * (self.say(label).count("\n") + 1)
        self.text(x, top + height / 2, label, SMALL, "start")

    def note(self, label: Label) -> None:
        """A paragraph below all that has been drawn."""
        self.paragraph(LEFT, self.bottom() + 14, label)

    # Boxes.

    def fill(
        self,
        place: Box,
        kind: str,
        label: Label | None = None,
        size: int = NORMAL,
        bold: bool = False,
        turned: bool = False,
        dashed: bool = False,
        color: str | None = None,
    ) -> Box:
        """A box with a label in its middle, which must fit. `color` replaces the one of its kind."""
        look = KINDS[kind]
        dash = ' stroke-dasharray="4 3"' if dashed or kind == "elsewhere" else ""
        self.svg.append(
            f'<rect x="{number(place.x)}" y="{number(place.y)}" width="{number(place.w)}" height="{number(place.h)}" rx="3" '
            f'fill="{color or look.fill}" stroke="{look.stroke}"{dash}/>'
        )
        self.shapes.append(overlaps.Shape("box", place, kind, is_opaque=look.fill != "none"))
        self.used.add(kind)
        if label is not None:
            text = self.text(place.cx, place.cy, label, size, bold=bold, turned=turned)
            inner = place.inset(0, PADDING) if turned else place.inset(PADDING, 0)
            assert inner.contains(text), (
                f"{self.say(label)!r} needs {text.w:.0f} x {text.h:.0f}, has {inner.w:.0f} x {inner.h:.0f}"
            )
        return place

    def box(
        self, x: float, y: float, w: float, h: float, kind: str = "plain", label: Label | None = None, *args, **options
    ) -> Box:
        return self.fill(Box(x, y, w, h), kind, label, *args, **options)

    def frame(self, x: float, y: float, w: float, h: float, label: Label | None = None, dashed: bool = False) -> Box:
        """A box around others, with its name at the top left."""
        place = self.box(x, y, w, h, "plain", dashed=dashed)
        if label is not None:
            self.heading(x + 10, y + 15, label)
        return place

    def badge(self, x: float, y: float, label: int) -> None:
        """A numbered circle, by which a list refers to a place of the picture."""
        self.svg.append(f'<circle cx="{number(x)}" cy="{number(y)}" r="9" fill="#fff" stroke="{LINE_COLOR}"/>')
        self.shapes.append(overlaps.Shape("box", Box(x - 9, y - 9, 18, 18), "badge", is_opaque=True))
        self.text(x, y, str(label), SMALL, bold=True)

    def slices(self, place: Box, kind: str, along: str, num: int, held: int) -> None:
        """A tensor cut into `num` slices along "x" or "y", of which one is here."""
        if num > 1:
            self.fill(place, "elsewhere")
        self.fill(place.cut(along, num)[held], kind)

    def polygon(self, points: list[Point], kind: str, shade: float = 0) -> None:
        """A face of a solid, darker by a positive `shade` or lighter by a negative one."""
        look = KINDS[kind]
        path = " ".join(f"{number(x)},{number(y)}" for x, y in points)
        self.svg.append(f'<polygon points="{path}" fill="{look.fill}" stroke="{look.stroke}" stroke-linejoin="round"/>')
        if shade:
            self.svg.append(f'<polygon points="{path}" fill="{"#000" if shade > 0 else "#fff"}" fill-opacity="{abs(shade)}"/>')
        self.used.add(kind)
        xs, ys = zip(*points)
        place = Box(min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys))
        self.shapes.append(overlaps.Shape("outline", place, kind))

    # Lines.

    def arrow(
        self,
        *points: Point,
        label: Label | None = None,
        side: str = "above",
        dashed: bool = False,
        both: bool = False,
        head: bool = True,
        size: int = SMALL,
    ) -> None:
        """A line through `points` with a head at its end, labeled beside its middle."""
        path = "M" + "L".join(f"{number(x)} {number(y)}" for x, y in points)
        ends = (' marker-end="url(#head)"' if head else "") + (' marker-start="url(#head)"' if both else "")
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.svg.append(f'<path d="{path}" fill="none" stroke="{LINE_COLOR}" stroke-width="1.4"{dash}{ends}/>')
        for start, end in pairwise(points):
            self.shapes.append(overlaps.Shape("line", Box.around(start, end), "arrow", line=(start, end)))
        if label is not None:
            middle = len(points) // 2
            (x0, y0), (x1, y1) = points[middle - 1], points[middle]
            self.beside((x0 + x1) / 2, (y0 + y1) / 2, label, side, size)

    def beside(self, x: float, y: float, label: Label, side: str, size: int = SMALL) -> None:
        """Text next to a point."""
        half = (self.say(label).count("\n") + 1) * size * LINE / 2
        dx, dy, anchor = {
            "above": (0, -half - 2, "middle"),
            "below": (0, half + 2, "middle"),
            "left": (-7, 0, "end"),
            "right": (7, 0, "start"),
        }[side]
        self.text(x + dx, y + dy, label, size, anchor)

    def bracket(self, x0: float, x1: float, y: float, label: Label) -> None:
        """An interval, open upwards, with its name below."""
        self.arrow((x0, y - 6), (x0, y), (x1, y), (x1, y - 6), head=False)
        self.beside((x0 + x1) / 2, y, label, "below")

    # The whole.

    def bottom(self) -> float:
        return max(shape.place.y1 for shape in self.shapes)

    def legend(self) -> None:
        """The meanings of all colors of the picture."""
        x, y = LEFT, self.bottom() + 18
        for name in KINDS:
            if name not in self.used or name not in self.meanings:
                continue
            width = 22 + text_width(self.say(self.meanings[name]), SMALL)
            if x + width > RIGHT:
                x, y = LEFT, y + 22
            self.box(x, y, 16, 12, name)
            self.text(x + 22, y + 6, self.meanings[name], SMALL, "start")
            x += width + 16

    def render(self) -> str:
        self.legend()
        height = self.bottom() + 16
        overlaps.check(self.shapes, Box(MARGIN / 2, 0, WIDTH - MARGIN, height))
        size = f'width="{WIDTH}" height="{number(height)}"'
        border = f'x="0.5" y="0.5" width="{WIDTH - 1}" height="{number(height - 1)}" rx="8"'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {number(height)}" {size} '
                f'role="img" aria-labelledby="title desc" font-family="{FONTS}" fill="{INK}">',
                f'<title id="title">{escape(self.title)}</title>',
                f'<desc id="desc">{escape(self.description)}</desc>',
                DEFINITIONS,
                f'<rect {border} fill="{CARD}" stroke="{CARD_BORDER}"/>',
                *self.svg,
                "</svg>",
                "",
            ]
        )

"""Checks that no text of a picture is crossed by another text, an arrow or the edge of a box."""

from dataclasses import dataclass

from geometry import Box, Point


@dataclass(frozen=True)
class Shape:
    what: str  # "text", "box", "line" or "outline", which is not checked
    place: Box
    name: str
    is_opaque: bool = False
    line: tuple[Point, Point] | None = None


def crosses(line: tuple[Point, Point], place: Box) -> bool:
    """Whether a segment passes through a box (Liang and Barsky)."""
    (x0, y0), (x1, y1) = line
    enter, leave = 0.0, 1.0
    for start, delta, low, high in [(x0, x1 - x0, place.x, place.x1), (y0, y1 - y0, place.y, place.y1)]:
        if delta == 0:
            if not low < start < high:
                return False
            continue
        near, far = sorted(((low - start) / delta, (high - start) / delta))
        enter, leave = max(enter, near), min(leave, far)
    return enter < leave


def spoils(shape: Shape, text: Shape) -> bool:
    """Whether `text` cannot be read well because of `shape`."""
    if shape.what == "text":
        return shape.place.meets(text.place)
    if shape.what == "box":
        return shape.place.meets(text.place) and not shape.place.contains(text.place)
    return shape.line is not None and crosses(shape.line, text.place)


def check(shapes: list[Shape], card: Box) -> None:
    for i, text in enumerate(shapes):
        if text.what != "text":
            continue
        assert card.contains(text.place), f"{text.name!r} is not inside the card: {text.place}"
        # What an opaque box under the text covers does not matter.
        floor = max((j for j in range(i) if shapes[j].is_opaque and shapes[j].place.contains(text.place)), default=-1)
        for j, shape in enumerate(shapes):
            if j > floor and j != i and spoils(shape, text):
                raise AssertionError(f"{text.name!r} at {text.place} meets {shape.what} {shape.name!r} at {shape.place}")

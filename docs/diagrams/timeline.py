"""Lanes of time: what happens when, from left to right."""

from geometry import Box
from style import SMALL, Label, Picture


class Lanes:
    def __init__(
        self, picture: Picture, x: float, y: float, unit: float, names: list[Label], height: float = 30, gap: float = 10
    ):
        """`unit` is the width of one unit of time. Names are written to the left of `x`."""
        self.picture, self.x, self.y, self.unit, self.height, self.gap = picture, x, y, unit, height, gap
        self.num = len(names)
        for lane, name in enumerate(names):
            picture.text(x - 10, self.row(lane) + height / 2, name, SMALL, "end")

    def row(self, lane: int) -> float:
        return self.y + lane * (self.height + self.gap)

    def at(self, time: float) -> float:
        return self.x + time * self.unit

    @property
    def end(self) -> float:
        return self.row(self.num) - self.gap

    def span(self, lane: int, start: float, end: float, kind: str, label: Label | None = None, size: int = SMALL) -> Box:
        return self.picture.box(self.at(start), self.row(lane), (end - start) * self.unit, self.height, kind, label, size)

    def axis(self, until: float, label: Label = ("time", "时间")) -> None:
        y = self.end + 14
        self.picture.arrow((self.x, y), (self.at(until), y))
        self.picture.text(self.at(until), y + 12, label, SMALL, "end")

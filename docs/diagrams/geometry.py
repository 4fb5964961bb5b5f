"""Rectangles and the points on their sides."""

from dataclasses import dataclass

Point = tuple[float, float]


@dataclass(frozen=True)
class Box:
    x: float
    y: float
    w: float
    h: float

    @staticmethod
    def around(a: Point, b: Point) -> "Box":
        return Box(min(a[0], b[0]), min(a[1], b[1]), abs(a[0] - b[0]), abs(a[1] - b[1]))

    @property
    def x1(self) -> float:
        return self.x + self.w

    @property
    def y1(self) -> float:
        return self.y + self.h

    @property
    def cx(self) -> float:
        return self.x + self.w / 2

    @property
    def cy(self) -> float:
        return self.y + self.h / 2

    @property
    def left(self) -> Point:
        return (self.x, self.cy)

    @property
    def right(self) -> Point:
        return (self.x1, self.cy)

    @property
    def top(self) -> Point:
        return (self.cx, self.y)

    @property
    def bottom(self) -> Point:
        return (self.cx, self.y1)

    def cut(self, along: str, num: int) -> list["Box"]:
        """Equal parts along "x" or "y"."""
        if along == "x":
            return [Box(self.x + i * self.w / num, self.y, self.w / num, self.h) for i in range(num)]
        return [Box(self.x, self.y + i * self.h / num, self.w, self.h / num) for i in range(num)]

    def inset(self, dx: float, dy: float) -> "Box":
        return Box(self.x + dx, self.y + dy, self.w - 2 * dx, self.h - 2 * dy)

    def contains(self, other: "Box") -> bool:
        return self.x <= other.x and self.y <= other.y and other.x1 <= self.x1 and other.y1 <= self.y1

    def meets(self, other: "Box") -> bool:
        return self.x < other.x1 and other.x < self.x1 and self.y < other.y1 and other.y < self.y1

"""The clock of all ranks of a node, as in `trainyard_trace::now_ns`.

It shows wall time, so that processes can compare times, and never runs backwards, because a process reads the wall
time once and adds the monotonic clock to it.
"""

import time

_WALL, _THEN = time.time_ns(), time.monotonic_ns()


def now_ns() -> int:
    """The current time in nanoseconds since 1970."""
    return _WALL + time.monotonic_ns() - _THEN


def from_wall_ns(wall_ns: int) -> int:
    """Converts a time that another library took from the wall clock."""
    return now_ns() - (time.time_ns() - wall_ns)

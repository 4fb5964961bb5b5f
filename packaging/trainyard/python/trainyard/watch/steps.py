"""Counts training steps at the optimizer, and measures how long they take.

PyTorch calls a hook after every step of every optimizer. The hook runs in the training loop: it reads a clock and
adds a few numbers, and leaves all else to the thread that writes heartbeats. It never touches a tensor, because
reading one would wait for its device.
"""

import math
import weakref
from bisect import bisect_left
from collections import deque

from .clock import now_ns

# These are the constants of step_time.rs and training_metrics.rs in crates/heartbeat.
WINDOW = 512
MIN_STEPS = 5
BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

# When another optimizer has taken so many steps since the counted one did, the counted one is out of use. A GAN may
# train its critic several times for each step of its generator.
_STEPS_TO_REPLACE = 16


class Steps:
    """The steps of one optimizer. A script with several would count each training step several times."""

    def __init__(self) -> None:
        self.last = (0, now_ns())
        """How many steps were taken, and when the last one ended. One tuple, so that no reader needs a lock."""
        self._times: deque[int] = deque(maxlen=WINDOW)
        self._counts = [0] * (len(BOUNDS) + 1)
        self._sum_ns = 0
        self._counted = lambda: None  # a weak reference: the script may drop its optimizer
        self._others: dict[int, int] = {}

    def after_step(self, optimizer, _args=None, _kwargs=None) -> None:
        """The hook: an optimizer has taken a step."""
        if optimizer is not self._counted() and not self._replaces(optimizer):
            return
        now, (count, then) = now_ns(), self.last
        if count > 0:  # nobody knows when the first step began
            self._times.append(now - then)
            self._sum_ns += now - then
            self._counts[bisect_left(BOUNDS, (now - then) / 1e9)] += 1
        self.last = (count + 1, now)
        self._others.clear()

    def _replaces(self, optimizer) -> bool:
        if self._counted() is not None:
            steps = self._others.get(id(optimizer), 0) + 1
            self._others[id(optimizer)] = steps
            if steps < _STEPS_TO_REPLACE:
                return False
        self._counted = weakref.ref(optimizer)
        return True

    def median_ns(self) -> int:
        """The median step time, or 0."""
        times = sorted(self._times)
        return times[len(times) // 2] if times else 0

    def report(self) -> dict:
        """The fields of a heartbeat about step times."""
        times = sorted(self._times)
        has_enough = len(times) >= MIN_STEPS
        return {
            "p99_step_ns": times[math.ceil(len(times) * 99 / 100) - 1] if has_enough else None,
            "max_step_ns": times[-1] if times and not has_enough else None,
            "metrics": {
                "learning_rate": self._learning_rate(),
                "step_times": {"counts": list(self._counts), "sum_seconds": self._sum_ns / 1e9},
            },
        }

    def _learning_rate(self) -> float | None:
        optimizer = self._counted()
        rate = optimizer.param_groups[0].get("lr") if optimizer and optimizer.param_groups else None
        # It may also be a tensor, perhaps on a device.
        return float(rate) if type(rate) in (int, float) and math.isfinite(rate) else None

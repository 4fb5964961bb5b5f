"""The thread that writes the heartbeats of this rank."""

import os
import sys
import threading

from .clock import now_ns
from .collectives import pending_and_completed
from .position import main_thread_position
from .slot import Slot
from .steps import Steps

_INTERVAL_SECONDS = 0.1
_INSPECTION_INTERVAL_NS = 1_000_000_000
# A step that takes this many times the median is not a normal one.
_SLOW_FACTOR = 2


class Writer:
    """Writes ten heartbeats per second until the process ends or anything fails."""

    def __init__(self, slot: Slot):
        self.steps = Steps()
        self._slot = slot
        self._rank = int(os.environ.get("RANK", "0"))
        self._stop = threading.Event()
        self._inspected_ns = 0
        self._findings: dict = {}
        self._thread = threading.Thread(target=self._run, name="trainyard.watch", daemon=True)
        self._thread.start()

    def after_step(self, optimizer, args, kwargs) -> None:
        """Counts a step of an optimizer. Called in the training loop, which must not fail because of it."""
        try:
            self.steps.after_step(optimizer, args, kwargs)
        except Exception as error:
            self.fail(error)

    # What `torch.compiler.disable` sets, without importing the compiler: it must not trace into the hook.
    after_step._torchdynamo_disable = True

    def finish(self) -> None:
        """Writes the last heartbeat. After an error the rank has not ended its training: its last step stays."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join(timeout=1)
        if not hasattr(sys, "last_type"):
            self._slot.write({**self._heartbeat(), "stage": "ended", "step": self.steps.last[0], "since_ns": now_ns()})

    def abandon(self) -> None:
        """Never writes again. A forked child has this object, but not its thread."""
        self._stop.set()

    def fail(self, error: Exception) -> None:
        """Gives up: the script goes on without heartbeats."""
        if not self._stop.is_set():
            self._stop.set()
            print(f"trainyard.watch: {type(error).__name__}: {error}; this rank is no longer watched", file=sys.stderr)
            self._slot.clear()

    def _run(self) -> None:
        try:
            self._slot.write(self._heartbeat())
            while not self._stop.wait(_INTERVAL_SECONDS):
                self._slot.write(self._heartbeat())
        except Exception as error:
            self.fail(error)

    def _heartbeat(self) -> dict:
        count, since_ns = self.steps.last
        self._inspect(now_ns(), since_ns)
        return {
            "rank": self._rank,
            # An evaluation or a checkpoint between two steps looks like a long step.
            "stage": "observed" if count else "starting",
            "step": count + 1 if count else 0,
            "num_steps": 0,
            "since_ns": since_ns,
            "written_ns": now_ns(),
            **self.steps.report(),
            "pending": [],
            "completed": [],
            "position": None,
            **self._findings,
        }

    def _inspect(self, now: int, since_ns: int) -> None:
        """Finds out why no step ends. This takes milliseconds, so normal steps are not inspected."""
        took_ns = now - since_ns
        if took_ns <= _INSPECTION_INTERVAL_NS or took_ns <= _SLOW_FACTOR * self.steps.median_ns():
            self._findings = {}
        elif now - self._inspected_ns >= _INSPECTION_INTERVAL_NS:
            self._inspected_ns = now
            pending, completed = pending_and_completed()
            self._findings = {"pending": pending, "completed": completed, "position": main_thread_position()}

"""Starts the watch in the process that is the worker, and in no other.

A worker's children inherit its environment: DataLoader workers, compilers, subprocesses. The first Python process
that finds a slot in its environment is the worker, and leaves its pid there.
"""

import atexit
import os
import sys

HEARTBEATS = "TRAINYARD_HEARTBEATS"
HEARTBEAT_OFFSET = "TRAINYARD_HEARTBEAT_OFFSET"
OWNER = "TRAINYARD_WATCH_OWNER"

_writer = None


def start() -> None:
    """Starts to write heartbeats if `trainyard run` started this process. Does nothing otherwise, or if called again."""
    global _writer
    if _writer is not None or not _owns_slot():
        return
    # Children of the worker need none of this.
    from .slot import Slot
    from .torch_import import when_imported
    from .writer import Writer

    try:
        _writer = Writer(Slot(os.environ[HEARTBEATS], int(os.environ[HEARTBEAT_OFFSET])))
        os.register_at_fork(after_in_child=_writer.abandon)
        atexit.register(_finish)
        when_imported("torch.optim.optimizer", _count_steps)
    except Exception as error:
        print(f"trainyard.watch: {type(error).__name__}: {error}; this rank is not watched", file=sys.stderr)


def _owns_slot() -> bool:
    path, offset = os.environ.get(HEARTBEATS), os.environ.get(HEARTBEAT_OFFSET)
    if not path or not offset:
        return False
    # The slot is part of the mark: a worker may itself be a launcher of workers with other slots.
    slot = f"{path} {offset}"
    pid, _, owned = os.environ.get(OWNER, "").partition(" ")
    if owned == slot and pid != str(os.getpid()):
        return False
    os.environ[OWNER] = f"{os.getpid()} {slot}"
    return True


def _count_steps(optimizer_module) -> None:
    optimizer_module.register_optimizer_step_post_hook(_writer.after_step)


def _finish() -> None:
    try:
        _writer.finish()
    except Exception as error:
        _writer.fail(error)

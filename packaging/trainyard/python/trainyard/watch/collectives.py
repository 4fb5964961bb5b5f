"""The collectives in flight, from PyTorch's Flight Recorder.

PyTorch records the last collectives of every group, but offers no public way to read the record inside the process.
Reading holds the GIL for about 15 microseconds per recorded collective, so it is for stalled ranks only.
"""

import pickle
import sys

from .clock import from_wall_ns, now_ns

# A collective that is in flight for this long holds up the rank: its peers have not entered it.
_BLOCKING_AFTER_NS = 1_000_000_000

# Names of operations contain one of these. The first that matches counts.
_KINDS = (
    ("barrier", "barrier"),
    ("all_reduce", "all_reduce"),
    ("allreduce", "all_reduce"),
    ("reduce_scatter", "reduce_scatter"),
    ("all_gather", "all_gather"),
    ("allgather", "all_gather"),
    ("all_to_all", "all_to_all"),
    ("alltoall", "all_to_all"),
    ("broadcast", "broadcast"),
    ("reduce", "reduce"),
    ("gather", "gather"),
    ("scatter", "scatter"),
    ("send", "send"),
    ("recv", "recv"),
)
OTHER_KIND = "other"
# PyTorch does not know what the bytes of a collective are for.
PURPOSE = "unknown"


def pending_and_completed() -> tuple[list[dict], list[dict]]:
    """The collectives in flight, oldest first, and the last completed one of every group."""
    pending, completed = [], {}
    for entry in _entries():
        if not (entry["retired"] or entry["state"] == "completed"):
            pending.append(_pending(entry))
        elif not entry["is_p2p"]:
            identity = _identity(entry)
            last = completed.setdefault(identity["group"], identity)
            if identity["sequence"] > last["sequence"]:
                completed[identity["group"]] = identity
    pending.sort(key=lambda collective: collective["since_ns"])
    if pending:
        pending[0]["is_blocking"] = now_ns() - pending[0]["since_ns"] >= _BLOCKING_AFTER_NS
    return pending, list(completed.values())


def _entries() -> list[dict]:
    distributed = sys.modules.get("torch.distributed")
    is_initialized = getattr(distributed, "is_initialized", None)  # none while torch is being imported
    if is_initialized is None or not is_initialized():
        return []
    from torch._C import _distributed_c10d as c10d

    entries = []
    # NCCL has a recorder of its own. PyTorch without CUDA has no function to read it, and older versions of PyTorch
    # have none for the other backends.
    for name in ("_dump_nccl_trace", "_dump_fr_trace"):
        if dump := getattr(c10d, name, None):
            trace = dump(includeCollectives=True, includeStackTraces=False, onlyActive=False)
            entries += pickle.loads(trace).get("entries", [])
    return entries


def _pending(entry: dict) -> dict:
    return {
        "id": _identity(entry),
        "members": _members(entry["process_group"][0]),
        "since_ns": from_wall_ns(entry["time_created_ns"]),
        "is_blocking": False,
        "shapes": entry["input_sizes"],
    }


def _identity(entry: dict) -> dict:
    return {
        "kind": kind(entry["profiling_name"]),
        "purpose": PURPOSE,
        "group": _group(*entry["process_group"]),
        "sequence": entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"],
    }


def kind(name: str) -> str:
    """The kind of the operation that PyTorch calls, for example, `nccl:_all_gather_base`."""
    name = name.lower()
    return next((kind for part, kind in _KINDS if part in name), OTHER_KIND)


def _group(name: str, description: str) -> str:
    if description == "default_pg":
        return "world"
    # A mesh calls its groups `mesh_dp`; `new_group` without a description leaves only the name, often a number.
    is_described = description not in ("", "undefined")
    return description.removeprefix("mesh_") if is_described else f"group {name}"


def _members(name: str) -> list[int]:
    from torch import distributed
    from torch._C._distributed_c10d import _resolve_process_group

    try:
        return list(distributed.get_process_group_ranks(_resolve_process_group(name)))
    except (RuntimeError, KeyError, ValueError):  # the script has destroyed the group
        return []

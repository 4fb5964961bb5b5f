"""Runs programs on simulated GPUs, and reads the reports of the simulated libraries."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from programs import RunFailed, program


def simulate(num_gpus: int, arch: int = 80, memory: int = 80, report: Path | None = None) -> list[str]:
    """The beginning of a command that runs on simulated GPUs with `memory` GiB each."""
    options = ["--gpus", str(num_gpus), "--arch", str(arch), "--memory", str(memory)]
    options += ["--report", str(report)] if report else []
    return [program("trainyard"), "simulate", *options, "--"]


def read_report(folder: Path, rank: int) -> dict:
    """The report of a rank from a folder of reports: the launcher, which has no rank, may leave one of rank 0 without
    steps."""
    for path in folder.glob("*.json"):
        report = json.loads(path.read_text())
        if report["rank"] == rank and report["steps"]:
            return report
    raise RunFailed(f"rank {rank} reported no steps: it does not call cudaProfilerStart")

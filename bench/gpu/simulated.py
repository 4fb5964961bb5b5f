"""Runs programs on simulated GPUs, and reads the reports of the simulated libraries."""

import json
import os
import shlex
import subprocess
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / "bench" / "peers"

loader = SourceFileLoader("compare", str(ROOT / "bench" / "compare"))
compare = module_from_spec(spec_from_loader("compare", loader))
loader.exec_module(compare)

RunFailed = compare.RunFailed
program = compare.program


def simulate(num_gpus: int, arch: int = 80, memory: int = 80, report: Path | None = None) -> list[str]:
    """The beginning of a command that runs on simulated GPUs with `memory` GiB each."""
    options = ["--gpus", str(num_gpus), "--arch", str(arch), "--memory", str(memory)]
    options += ["--report", str(report)] if report else []
    return [program("trainyard"), "simulate", *options, "--"]


def trainyard_run(num_ranks: int, *options: str) -> list[str]:
    return [program("trainyard"), "run", "--standalone", "--nproc-per-node", str(num_ranks), *options, "--"]


def torchrun(num_ranks: int) -> list[str]:
    """PyTorch's launcher. It is started as a module, because it may not be on the path."""
    command = [compare.python_with_torch(), "-W", "ignore", "-m", "torch.distributed.run"]
    return [*command, "--standalone", f"--nproc-per-node={num_ranks}"]


def run(command: list[str], timeout: float) -> str:
    """Runs a command to its end, and returns its output."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen(command, env=env, start_new_session=True, **pipes)
    try:
        stdout, stderr = process.communicate(timeout=timeout)
        error = f"exit status {process.returncode}" if process.returncode else ""
    except subprocess.TimeoutExpired:
        stdout, stderr = compare.end_session(process)
        error = f"timed out after {timeout:.0f} s"
    except BaseException:
        compare.end_session(process)
        raise
    if error:
        tail = "\n".join(f"    {line}" for line in (stdout + stderr).splitlines()[-25:])
        raise RunFailed(f"{error}\n    {shlex.join(command)}\n{tail}")
    return stdout


def read_report(folder: Path, rank: int) -> dict:
    """The report of a rank from a folder of reports: the launcher, which has no rank, may leave one of rank 0 without
    steps."""
    for path in folder.glob("*.json"):
        report = json.loads(path.read_text())
        if report["rank"] == rank and report["steps"]:
            return report
    raise RunFailed(f"rank {rank} reported no steps: it does not call cudaProfilerStart")

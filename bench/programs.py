"""Finds and runs the programs that benchmarks measure."""

import json
import os
import re
import shlex
import signal
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / "bench" / "peers"
# A result, with or without the launcher's prefix.
RESULT = re.compile(r"^(?:\[rank\d+\]:\s*)?(\{.*\})\s*$")


class RunFailed(Exception):
    pass


# --------------------------------------------------------------------------- commands


def python_with_torch() -> str:
    """The Python interpreter that ./setup installed."""
    if given := os.environ.get("TRAINYARD_PYTHON"):
        return given
    config = ROOT / ".cargo" / "config.toml"
    found = re.search(r'^TRAINYARD_PYTHON\s*=\s*"(.+)"', config.read_text(), re.M) if config.exists() else None
    if not found:
        raise RunFailed("cannot find a Python with torch: run ./setup, or set TRAINYARD_PYTHON")
    return found[1]


def program(name: str, folder: Path | None = None) -> str:
    """A program of this tree, or of another version in `folder`."""
    folder = folder or Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target") / "release"
    if not (folder / name).exists():
        raise RunFailed(f"{name} is not in {folder}: run cargo build --release")
    return str(folder / name)


def trainyard_run(num_ranks: int, *options: str, folder: Path | None = None) -> list[str]:
    """Trainyard's launcher on this host alone."""
    return [program("trainyard", folder), "run", "--standalone", "--nproc-per-node", str(num_ranks), *options, "--"]


def torchrun(num_ranks: int) -> list[str]:
    """PyTorch's launcher. It is started as a module, because it may not be on the path."""
    command = [python_with_torch(), "-W", "ignore", "-m", "torch.distributed.run"]
    return [*command, "--standalone", f"--nproc-per-node={num_ranks}"]


def config_options(keys: dict) -> list[str]:
    """Keys of a config as options of a command."""
    return [text for key, value in keys.items() for text in (f"--{key}", str(value))]


# --------------------------------------------------------------------------- running


def in_turn(sides, number: int) -> list:
    """The sides in the order of a round: every second one runs them in the opposite order, so that a trend of the host
    favors no side."""
    return list(sides) if number % 2 == 0 else list(reversed(sides))


def run(command: list[str], timeout: float, env: dict[str, str] | None = None) -> str:
    """Runs a command to its end with one thread per rank, and returns its output."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **(env or {})}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen(command, env=env, start_new_session=True, **pipes)
    try:
        stdout, stderr = process.communicate(timeout=timeout)
        error = f"exit status {process.returncode}" if process.returncode else ""
    except subprocess.TimeoutExpired:
        stdout, stderr = end_session(process)
        error = f"timed out after {timeout:.0f} s"
    except BaseException:
        end_session(process)
        raise
    if error:
        raise failure(error, command, stdout + stderr)
    return stdout


def run_for_result(command: list[str], timeout: float) -> dict:
    """Runs a command on the loopback interface, and returns the result that it prints."""
    stdout = run(command, timeout, {"GLOO_SOCKET_IFNAME": "lo"})
    result = result_line(stdout)
    if result is None:
        raise failure("the program printed no result", command, stdout)
    return result


def failure(error: str, command: list[str], output: str) -> RunFailed:
    tail = "\n".join(f"    {line}" for line in output.splitlines()[-25:])
    return RunFailed(f"{error}\n    {shlex.join(command)}\n{tail}")


def end_session(process) -> tuple[str, str]:
    """Kills the launcher and every rank that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    return process.communicate()


def result_line(stdout: str) -> dict | None:
    """Returns the last result line."""
    for line in reversed(stdout.splitlines()):
        if found := RESULT.match(line):
            try:
                return json.loads(found[1])
            except ValueError:
                continue
    return None

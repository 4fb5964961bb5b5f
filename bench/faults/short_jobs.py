"""Short jobs with one fault each: a script says what must be true after the fault, and this module runs it many times."""

import argparse
import json
import random
import re
import subprocess
import tempfile
from pathlib import Path

from cluster import log

from programs import ROOT, config_options, program, trainyard_run

BAD_VALUES = 65  # exit codes of a job that is not restarted
REJECTED = 78


class Broken(Exception):
    """A promise that was not kept."""


def check(condition, promise, output=""):
    if not condition:
        raise Broken(f"{promise}\n{output}")


def train_command(folder, num_ranks, keys):
    """A job of the tiny model with a checkpoint every second step."""
    config = str(ROOT / "configs" / "llama-tiny.toml")
    defaults = {
        "training.steps": 8,
        "training.global_batch_size": 12,
        "training.local_batch_size": 12 // num_ranks,
        "lr_scheduler.warmup_steps": 1,
        "metrics.log_freq": 1,
        "checkpoint.enable": "true",
        "checkpoint.interval": 2,
        "checkpoint.keep_latest_k": 0,
        "job.dump_folder": str(folder),
    }
    launcher = trainyard_run(num_ranks, "--max-restarts", "3")
    return [*launcher, program("trainyard"), "train", config, *config_options({**defaults, **keys})]


def train(folder, num_ranks, keys, timeout=120):
    """Trains to the end; the exit code and the output."""
    command = train_command(folder, num_ranks, keys)
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout)
    return ended.returncode, ended.stdout


def checkpoints(folder):
    """The steps of the checkpoints in a job's folder."""
    names = (path.name for path in (Path(folder) / "checkpoint").glob("step-*"))
    return sorted(int(name.removeprefix("step-")) for name in names)


def check_all_whole(folder):
    """Every checkpoint of the folder is whole."""
    command = [program("trainyard"), "ckpt", "repair", str(Path(folder) / "checkpoint")]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    check(ended.returncode == 0, "every checkpoint is whole", ended.stdout)


def resumed_from(output):
    found = re.findall(r"resumed from step (\d+)", output)
    return int(found[-1]) if found else None


def main(description, one_run):
    """Runs `one_run(rng, folder)` many times, each in a folder of its own. It raises `Broken` if a promise is not kept."""
    p = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--runs", type=int, default=20)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--json", action="store_true")
    args = p.parse_args()
    rng = random.Random(args.seed)
    rows = []
    for number in range(args.runs):
        with tempfile.TemporaryDirectory() as folder:
            try:
                rows.append({"run": one_run(rng, Path(folder)), "broken": None})
            except Broken as broken:
                rows.append({"run": None, "broken": str(broken)})
        log(f"{number + 1}: {rows[-1]['broken'] or rows[-1]['run']}")
    num_kept = sum(row["broken"] is None for row in rows)
    if args.json:
        print(json.dumps({"seed": args.seed, "runs": rows}))
    print(f"{num_kept} of {args.runs} ended as promised")
    raise SystemExit(0 if num_kept == args.runs else 2)

"""Shows a run in Weights & Biases or MLflow from a process beside it: training never waits for a server.

It sends the lines of metrics.jsonl with the installed client; its environment variables apply (WANDB_MODE for example).
A position file beside metrics.jsonl holds what was sent, so a second call sends only new lines, to the same run.

A job that goes back to a checkpoint reports some steps again. Of lines with the same step, the last one in the file
counts. But what was sent cannot be taken back: with --follow, such a step gets a second point.
"""

import argparse
import fcntl
import hashlib
import importlib.util
import json
import math
import os
import signal
import sys
import threading
import time
from collections import namedtuple
from pathlib import Path

EXAMPLE = """example:
  trainyard run --standalone --nproc-per-node 2 -- trainyard train llama-tiny.toml --metrics.enable_jsonl true &
  python -m trainyard.metrics_bridge wandb outputs --follow --pid $! --project llama"""
POLL_SECONDS, GRACE_SECONDS = 2, 60  # between two looks at the file; for an evaluation after the last report
MAX_ROWS, MAX_METRICS, MAX_PARAMS, MAX_VALUE = 50, 1000, 100, 6000  # of a batch; the last three are MLflow's limits
Row = namedtuple("Row", "step metrics line end")  # the number of its last line, from 0, and the offset after it


class Problem(Exception):
    """What the user can change."""


class Wandb:
    """The own step of W&B must grow: it is the number of the line. Charts have the metric `step` as their x axis."""

    def __init__(self, client, run_id, project, name):
        self.run = client.init(id=run_id, project=project, name=name, resume="allow")
        self.id, self.finish = self.run.id, self.run.finish
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def send_config(self, config):
        self.run.config.update(config, allow_val_change=True)

    def send(self, rows):
        for row in rows:
            self.run.log({"step": row.step, **row.metrics}, step=row.line, commit=True)


class Mlflow:
    """The config becomes parameters. MLflow cannot change a parameter: the first value stays."""

    def __init__(self, client, run_id, project, name):
        self.client, self.id = client.MlflowClient(), run_id
        self.metric, self.param = client.entities.Metric, client.entities.Param
        if run_id:
            return self.client.update_run(run_id, status="RUNNING")
        experiment = client.set_experiment(project).experiment_id
        self.id = self.client.create_run(experiment, run_name=name).info.run_id

    def send_config(self, config):
        known = self.client.get_run(self.id).data.params
        params = [self.param(key, str(value)[:MAX_VALUE]) for key, value in flat(config, ".") if key not in known]
        for start in range(0, len(params), MAX_PARAMS):
            self.client.log_batch(self.id, params=params[start : start + MAX_PARAMS])

    def send(self, rows):
        now = int(1000 * time.time())
        metrics = [self.metric(key, value, now, row.step) for row in rows for key, value in row.metrics.items()]
        for start in range(0, len(metrics), MAX_METRICS):
            self.client.log_batch(self.id, metrics=metrics[start : start + MAX_METRICS])

    def finish(self):
        self.client.set_terminated(self.id)


class Position(dict):
    """What was sent, in a file that one process at a time can open."""

    def __init__(self, path):
        super().__init__(run_id=None, project=None, config=None, offset=0, lines=0, step=0)
        self.path, self.file = path, os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Problem(f"another process sends this run: it has locked {path}") from None
        self.update(json.loads(os.pread(self.file, 1 << 16, 0) or b"{}"))

    def save(self, **values):
        self.update(values)
        os.ftruncate(self.file, os.pwrite(self.file, json.dumps(self).encode() + b"\n", 0))


def flat(table, separator, prefix=""):
    """The entries of nested tables, with the keys joined."""
    for key, value in table.items():
        nested = isinstance(value, dict)
        yield from flat(value, separator, f"{prefix}{key}{separator}") if nested else [(prefix + key, value)]


def metrics_of(record):
    """The numbers of a line. `null` is a number that is not finite, except for an MFU, which is unknown then."""
    metrics = {}
    for load in record.pop("expert_loads", []):
        rows, layer = load["rows"], f"experts/layer{load['layer']}"
        metrics[f"{layer}/max_over_mean"] = max(rows, default=0) * len(rows) / max(sum(rows), 1)
        metrics[f"{layer}/dropped_share"] = load.get("dropped", 0) / max(sum(rows), 1)
    numbers = {key: math.nan if value is None and key != "mfu" else value for key, value in flat(record, "/")}
    return metrics | {key: float(value) for key, value in numbers.items() if isinstance(value, (int, float))}


def read_rows(path, position):
    """The rows of the whole lines that were not sent, in the order of the last line of each step."""
    with open(path, "rb") as file:
        first, end = file.readline(), position["offset"]
        if not first.endswith(b"\n"):
            return []
        digest = hashlib.sha256(first).hexdigest()
        if position.setdefault("first_line", digest) != digest or os.fstat(file.fileno()).st_size < end:
            raise Problem(f"{path} is that of another job; delete {position.path} to send it to a new run")
        file.seek(end)
        lines = file.read().split(b"\n")[:-1]  # without what follows the last newline: it is half-written
    rows, step = {}, position["step"]
    for number, line in enumerate(lines, position["lines"]):
        end += len(line) + 1
        try:
            record = json.loads(line)
            step, metrics = int(record.pop("step")), metrics_of(record)
        except (ValueError, KeyError, TypeError, AttributeError):
            print(f"warning: line {number + 1} of {path} is damaged and left out", file=sys.stderr)
            metrics = {}  # of the step before
        rows[step] = Row(step, (rows.pop(step).metrics if step in rows else {}) | metrics, number, end)
    return list(rows.values())


def read_config(folder, text):
    """The config, from `text` or else the newest checkpoint in the folder of the run; empty without both."""
    try:
        if not text:
            newest = max(folder.glob("*/step-*/manifest.json"), key=os.path.getmtime)
            text = json.loads(newest.read_text().split("\n", 1)[1])["state"]["config"]  # after a digest
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return {}  # there is no checkpoint, or it is just being deleted
    return importlib.import_module("tomllib").loads(text) if sys.version_info >= (3, 11) else {"toml": text}


def has_ended(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def bridge(options, open_run, stop):
    """Sends what is new; with --follow, until the job ends or `stop` is set."""
    path, config, last_step = Path(options.run_folder, "metrics.jsonl"), {}, math.inf
    if not (path.parent if options.follow else path).exists():
        raise Problem(f"there is no {path}; train with --metrics.enable_jsonl true")
    position = Position(path.with_name(f"metrics.{options.service}.json"))
    variable = {"wandb": "WANDB_PROJECT", "mlflow": "MLFLOW_EXPERIMENT_NAME"}[options.service]
    run, num_sent, changed = None, 0, time.monotonic()
    while True:
        ends = stop.is_set() or not options.follow or (options.pid and has_ended(options.pid))
        rows = read_rows(path, position) if path.exists() else []  # after that, so that the last ones are included
        if not config and (config := read_config(path.parent, options.config and Path(options.config).read_text())):
            every = config.get("metrics", {}).get("log_freq", 10)
            last_step = config.get("training", {}).get("steps", math.inf) - every + 1
        digest = hashlib.sha256(repr(config).encode()).hexdigest() if config else position["config"]
        if not run and (rows or (position["run_id"] and digest != position["config"])):
            project = position["project"] or options.project or os.environ.get(variable, "trainyard")
            run = open_run(position["run_id"], project, options.name)
            position.save(run_id=run.id, project=project)
        if run and digest != position["config"]:
            run.send_config(config)
            position.save(config=digest)
        for start in range(0, len(rows), MAX_ROWS):
            batch = rows[start : start + MAX_ROWS]
            run.send(batch)
            position.save(offset=batch[-1].end, lines=batch[-1].line + 1, step=batch[-1].step)
            num_sent, changed = num_sent + len(batch), time.monotonic()
        if ends or (not options.pid and position["step"] >= last_step and time.monotonic() - changed > GRACE_SECONDS):
            break
        stop.wait(POLL_SECONDS)
    if run:
        run.finish()
    print(f"sent {num_sent} rows" + (f" to run {run.id}" if run else ": nothing is new"))


def main(argv=None, client=None):
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m trainyard.metrics_bridge", None, __doc__, EXAMPLE, formatter_class=raw)
    add = parser.add_argument
    add("service", choices=["wandb", "mlflow"])
    add("run_folder", metavar="RUN_FOLDER", help="job.dump_folder, in which metrics.jsonl is")
    add("--follow", action="store_true", help="wait for new rows until the job ends, or until SIGTERM or SIGINT")
    add("--pid", type=int, help="with --follow: the job ends when this process does, else 60 s after its last report")
    add("--project", metavar="NAME", help="W&B project or MLflow experiment of a new run; by default trainyard")
    add("--name", metavar="NAME", help="name of a new run")
    add("--config", metavar="FILE", help="TOML with the config, instead of that in the newest checkpoint")
    options, stop = parser.parse_args(argv), threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):  # a second one ends at once
        signal.signal(number, lambda number, _: (stop.set(), signal.signal(number, signal.SIG_DFL)))
    service = options.service
    try:
        if not client and not getattr(importlib.util.find_spec(service), "origin", None):  # W&B writes a folder `wandb`
            raise Problem(f"{service} is not installed for {sys.executable}: pip install {service}")
        client = client or importlib.import_module(service)
        bridge(options, lambda *run: (Wandb if service == "wandb" else Mlflow)(client, *run), stop)
        return 0
    except Exception as error:
        text = error if isinstance(error, Problem) else f"{error!r}; the same command goes on after what was sent"
        print(f"error: {text}", file=sys.stderr)
        return 2 if isinstance(error, Problem) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Agents on loopback that train a tiny model, and their output with timestamps."""

import bisect
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from programs import ROOT, config_options, program, trainyard_run

STEP = re.compile(r"step:\s*(\d+)\s+loss:\s*([\d.]+)")
RESUMED = re.compile(r"resumed from step (\d+)")
FORMED = re.compile(r"epoch (\d+): ranks \d+ to \d+ of (\d+)")
ASSIGNED = re.compile(r"epoch (\d+): ranks (\d+) to \d+ of (\d+), node \d+ of (\d+), store at (\S+)")
LEASE = 3.0
MAX_LOST = 1  # steps per fault
GLOBAL_BATCH = 8
MAX_PAUSE = 0.5
WARMUP = 10  # steps, from the config: no job is shorter
DIVISIBLE_BATCH = 12  # divisible by the sizes of worlds of one to four
COMPARED = 1000  # steps: only the first ones are compared, since the reference job takes as long
TOLERANCE = 1.5e-5  # losses are logged with five digits


class Timeout(Exception):
    pass


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def train(steps, *more, global_batch=GLOBAL_BATCH):
    """The command of a worker, which logs every step and saves it to an in-memory checkpoint. In double precision, so
    that the losses of worlds of any size agree in every digit of the log."""
    config = str(ROOT / "configs" / "llama-tiny.toml")
    keys = {
        "training.steps": steps,
        "training.dtype": "float64",
        "training.global_batch_size": global_batch,
        "metrics.log_freq": 1,
        "checkpoint.memory_interval": 1,
        "lr_scheduler.decay_type": "constant",
    }
    return [program("trainyard"), "train", config, *config_options(keys), *more]


def agent_command(nodes, rdzv_args, secret, worker, lease=LEASE):
    """The command of an agent with one worker, with unlimited restarts and short timeouts."""
    timeouts = f"lease={lease},last_call_timeout=1,rejoin_timeout=0.5"
    command = [program("trainyard"), "run", "--nnodes", nodes, "--nproc-per-node", "1", *rdzv_args]
    command += ["--rdzv-conf", timeouts, "--max-restarts", "1000000", "--run-secret-file", secret]
    return [*command, "--", *worker]


# On SIGTERM the script exits normally, which kills its processes.
signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))


class PauseMonitor(threading.Thread):
    """Measures how long this script itself was paused: then the host was too busy for the measurements."""

    def __init__(self):
        super().__init__(daemon=True)
        self.longest = 0.0
        self.start()

    def run(self):
        before = time.monotonic()
        while True:
            time.sleep(0.05)
            now = time.monotonic()
            self.longest, before = max(self.longest, now - before), now


PAUSES = PauseMonitor()


class Process:
    """A process whose lines are kept with their timestamps. It is killed with the script."""

    def __init__(self, command):
        self.lines = []
        self.changed = threading.Condition()
        # One thread per rank in every world, as for ranks that share a node.
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.pid = self.process.pid
        # For debugging.
        dir = os.environ.get("FAULTS_LOGS")
        self.log = open(Path(dir) / f"{self.pid}.log", "w") if dir else None
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self):
        for line in self.process.stdout:
            if line.startswith("    | "):
                continue  # a report repeats a worker's last lines
            with self.changed:
                self.lines.append((time.monotonic(), line.rstrip()))
                if self.log:
                    print(f"{self.lines[-1][0]:.3f} {line.rstrip()}", file=self.log, flush=True)
                self.changed.notify_all()

    def wait_for(self, pattern, since=0.0, within=60.0):
        """The time and match of the first line after `since` that matches a pattern."""
        deadline, next_line = time.monotonic() + within, self.first_after(since)
        with self.changed:
            while True:
                for at, line in self.lines[next_line:]:
                    if found := re.search(pattern, line):
                        return at, found
                next_line = len(self.lines)
                if not self.changed.wait(deadline - time.monotonic()):
                    tail = "\n".join(line for _, line in self.lines[-15:])
                    raise Timeout(f"no {pattern!r} within {within} s; the last lines were\n{tail}")

    def first_after(self, since):
        """The index of the first line at or after a time; long jobs have many lines."""
        with self.changed:
            return bisect.bisect_left(self.lines, (since,))

    def last_step(self):
        with self.changed:
            steps = (int(found[1]) for _, line in reversed(self.lines) if (found := STEP.search(line)))
            return next(steps, 0)

    def losses(self):
        """The logged losses of every step; several if the step was repeated."""
        logged = {}
        for _, line in self.lines:
            if found := STEP.search(line):
                logged.setdefault(int(found[1]), []).append(float(found[2]))
        return logged

    def kill(self, with_signal=signal.SIGKILL):
        if self.process.poll() is None:
            self.process.send_signal(with_signal)
            self.process.wait()


class Cluster:
    """A rendezvous, and agents with one worker each."""

    def __init__(self, nodes, steps, global_batch=GLOBAL_BATCH):
        self.dir = tempfile.TemporaryDirectory()
        self.run = f"faults-{os.getpid()}-{free_port()}"
        self.endpoint = f"127.0.0.1:{free_port()}"
        self.secret = str(Path(self.dir.name) / "secret")
        self.nodes, self.steps, self.global_batch = nodes, steps, global_batch
        trainyard = program("trainyard")
        record = str(Path(self.dir.name) / "record")
        command = [trainyard, "rendezvous", "--rdzv-id", self.run, "--bind", self.endpoint]
        self.server = Process([*command, "--run-secret-file", self.secret, "--record", record])
        self.server.wait_for("rendezvous of run")
        self.agents = []

    def command(self, worker):
        """The command of an agent of this cluster."""
        rdzv_args = ["--rdzv-id", self.run, "--rdzv-backend", "server", "--rdzv-endpoint", self.endpoint]
        return agent_command(self.nodes, rdzv_args, self.secret, worker)

    def agent(self, *more):
        agent = Process(self.command(train(self.steps, *more, global_batch=self.global_batch)))
        self.agents.append(agent)
        return agent

    def close(self):
        for process in [*self.agents, self.server]:
            process.kill()
        self.dir.cleanup()


def wait_for_any(agents, pattern, since=0.0, within=60.0):
    """The time and match of the first line of any agent after `since`: rank 0 may move between agents."""
    deadline = time.monotonic() + within
    positions = [(agent, agent.first_after(since)) for agent in agents]
    while True:
        changed = [(agent, agent.lines[number:]) for agent, number in positions]
        logged = [(at, found) for _, lines in changed for at, line in lines if (found := re.search(pattern, line))]
        if logged:
            return min(logged, key=lambda one: one[0])
        positions = [(agent, number + len(lines)) for (agent, number), (_, lines) in zip(positions, changed)]
        if time.monotonic() > deadline:
            tails = "\n---\n".join("\n".join(line for _, line in agent.lines[-15:]) for agent in agents)
            raise Timeout(f"no {pattern!r} within {within} s; the last lines were\n{tails}")
        time.sleep(0.002)


def wait_for_world(agent, size, since, within=60.0):
    """The time at which an agent entered a world of `size` ranks."""
    while True:
        since, found = agent.wait_for(FORMED.pattern, since=since, within=within)
        if int(found[2]) == size:
            return since
        since += 1e-6


def last_step(agents):
    return max(agent.last_step() for agent in agents)


def all_losses(agents):
    losses = {}
    for agent in agents:
        for step, logged in agent.losses().items():
            losses.setdefault(step, []).extend(logged)
    return losses


def reused_epochs(agents):
    """Epochs of more than one world: with different sizes or stores, or with a rank assigned twice."""
    worlds, ranks = {}, {}
    for agent in agents:
        for _, line in list(agent.lines):
            if found := ASSIGNED.search(line):
                epoch, rank, *world = found.groups()
                worlds.setdefault(epoch, set()).add(tuple(world))
                ranks.setdefault(epoch, []).append(rank)
    twice = [epoch for epoch in worlds if len(worlds[epoch]) > 1 or len(set(ranks[epoch])) < len(ranks[epoch])]
    return sorted(map(int, twice))


def step_times(agents):
    """The duration of every logged step, by its timestamp; None for the first step of a world."""
    times = {}
    for agent in agents:
        before = None
        for at, line in list(agent.lines):
            if FORMED.search(line):
                before = None
            elif STEP.search(line):
                times[at] = at - before if before else None
                before = at
    return times


def logged_steps(agents):
    """Every step with its timestamp, in order, without those of worlds that had ended by then: an agent that was stopped
    forwards the earlier output of its workers when it continues."""
    lines = sorted((at, number, line) for number, agent in enumerate(agents) for at, line in list(agent.lines))
    newest, epochs, steps = 0, {}, []
    for at, number, line in lines:
        if found := FORMED.search(line):
            epochs[number] = int(found[1])
            newest = max(newest, epochs[number])
        elif (found := STEP.search(line)) and epochs.get(number) == newest:
            steps.append((at, int(found[1])))
    return steps


def kept(agents):
    """The steps that count, with their timestamps: those that no later world repeated."""
    steps = []
    for at, step in logged_steps(agents):
        while steps and steps[-1][1] >= step:
            steps.pop()
        steps.append((at, step))
    return steps


def max_lost(agents):
    """The maximum number of steps that a new world had to repeat."""
    logged = logged_steps(agents)
    return max((before - step + 1 for (_, before), (_, step) in zip(logged, logged[1:])), default=0)


def stalls(steps, faults, end):
    """For each fault: the longest time between two steps that count, until the next fault."""
    times = [at for at, _ in steps]
    longest = [0.0] * len(faults)
    for since, until in zip(times, [*times[1:], end]):
        # The cause is the first fault in the interval, or else the last one before it.
        within = [number for number, at in enumerate(faults) if since <= at < until]
        before = [number for number, at in enumerate(faults) if at < since]
        for cause in within[:1] or before[-1:]:
            longest[cause] = max(longest[cause], until - since)
    return longest


def workers(agent_pid):
    """The worker processes of an agent."""
    found = []
    for task in Path(f"/proc/{agent_pid}/task").glob("*/children"):
        for pid in task.read_text().split():
            try:
                if b"trainyard-engine" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]:
                    found.append(int(pid))
            except OSError:
                pass
    return found


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until_gone(pids, within=30.0):
    deadline = time.monotonic() + within
    while any(is_running(pid) for pid in pids):
        if time.monotonic() > deadline:
            raise Timeout(f"{[pid for pid in pids if is_running(pid)]} are still running after {within} s")
        time.sleep(0.001)
    return time.monotonic()


def reference(steps, global_batch=GLOBAL_BATCH):
    """The losses of the same job without faults, as far as they are compared."""
    micro_batch = max(size for size in range(1, 9) if global_batch // 2 % size == 0)
    halves = ["--training.local_batch_size", str(micro_batch)]
    job = Process([*trainyard_run(2), *train(min(max(steps, WARMUP), COMPARED), *halves, global_batch=global_batch)])
    job.process.wait()
    job.reader.join()
    return job.losses()


def compare_losses(ours, reference):
    """The largest difference and the number of compared steps; infinite if no step can be compared."""
    steps = [step for step in ours if step in reference]
    if not steps:
        return math.inf, 0
    worst = max(abs(loss - reference[step][0]) for step in steps for loss in ours[step])
    return worst, len(steps)


def percentile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def table(rows, limits):
    """Prints p50, p99 and maximum of every measurement with its limit; returns how often limits were exceeded."""
    print(f"{'':34}{'p50':>9}{'p99':>9}{'max':>9}{'limit':>9}")
    exceeded = 0
    for name in rows[0] if rows else []:
        values, limit = [row[name] for row in rows], limits.get(name)
        exceeded += sum(limit is not None and value > limit for value in values)
        shown = f"{limit:9.3f}" if limit is not None else f"{'':>9}"
        print(f"{name:34}{percentile(values, 0.5):9.3f}{percentile(values, 0.99):9.3f}{max(values):9.3f}{shown}")
    if PAUSES.longest > MAX_PAUSE:
        print(f"this script itself was paused for {PAUSES.longest:.1f} s: the host was busy, and times are too long")
    return exceeded


def log(text):
    print(text, flush=True, file=sys.stderr)

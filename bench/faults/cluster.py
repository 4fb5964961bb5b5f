"""Agents on loopback that train a tiny model, and what they say, with the time at which they said it."""

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
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
loader = SourceFileLoader("compare", str(ROOT / "bench" / "compare"))
compare = module_from_spec(spec_from_loader("compare", loader))
loader.exec_module(compare)

STEP = re.compile(r"step:\s*(\d+)\s+loss:\s*([\d.]+)")
RESUMED = re.compile(r"resumed after step (\d+)")
FORMED = re.compile(r"epoch (\d+): ranks \d+ to \d+ of (\d+)")
PLACE = re.compile(r"epoch (\d+): ranks (\d+) to \d+ of (\d+), node \d+ of (\d+), store at (\S+)")
LEASE = 3.0
MOST_LOST = 1  # steps, by one fault
GLOBAL_BATCH = 8
STOOD_STILL = 0.5
WARMUP = 10  # the config's: no job is shorter
ANY_BATCH = 12  # for worlds of one to four: all of them divide it
COMPARED = 1000  # steps: of longer jobs the first so many are compared, since the reference takes as long
TOLERANCE = 1.5e-5  # losses are told with five digits


class TooSlow(Exception):
    pass


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def train(steps, *more, global_batch=GLOBAL_BATCH):
    """A worker's command: every step is told, and copied into memory. In double precision, in which the losses of worlds
    of any size agree in every digit that is told."""
    config = str(ROOT / "configs" / "llama-tiny.toml")
    keys = {
        "training.steps": steps,
        "training.dtype": "float64",
        "training.global_batch_size": global_batch,
        "metrics.log_freq": 1,
        "checkpoint.memory_interval": 1,
        "lr_scheduler.decay_type": "constant",
    }
    words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    return [compare.program("trainyard"), "train", config, *words, *more]


def agent_command(nodes, place, secret, worker, lease=LEASE):
    """An agent with one worker, which is patient with faults and with nothing else."""
    waits = f"lease={lease},last_call_timeout=1,regather_timeout=0.5"
    command = [compare.program("trainyard"), "run", "--nnodes", nodes, "--nproc-per-node", "1", *place]
    command += ["--rdzv-conf", waits, "--max-restarts", "1000000", "--run-secret-file", secret]
    return [*command, "--", *worker]


# Whoever is asked to end sees its processes off first.
signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))


class Pulse(threading.Thread):
    """Feels whether this script itself stood still: then what it measured is the machine's doing."""

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


PULSE = Pulse()


class Process:
    """A process that ends with the script, whose lines are kept with their times."""

    def __init__(self, command):
        self.lines = []
        self.news = threading.Condition()
        # One thread per rank in every world, as ranks that share a machine have it.
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.pid = self.process.pid
        # For whoever wants to see what went wrong.
        folder = os.environ.get("FAULTS_LOGS")
        self.log = open(Path(folder) / f"{self.pid}.log", "w") if folder else None
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self):
        for line in self.process.stdout:
            if line.startswith("    | "):
                continue  # a report repeats a worker's last lines
            with self.news:
                self.lines.append((time.monotonic(), line.rstrip()))
                if self.log:
                    print(f"{self.lines[-1][0]:.3f} {line.rstrip()}", file=self.log, flush=True)
                self.news.notify_all()

    def wait_for(self, pattern, since=0.0, within=60.0):
        """The time and match of the first line after a time that has a pattern."""
        deadline, seen = time.monotonic() + within, self.first_after(since)
        with self.news:
            while True:
                for at, line in self.lines[seen:]:
                    if found := re.search(pattern, line):
                        return at, found
                seen = len(self.lines)
                if not self.news.wait(deadline - time.monotonic()):
                    tail = "\n".join(line for _, line in self.lines[-15:])
                    raise TooSlow(f"no {pattern!r} within {within} s; the last lines were\n{tail}")

    def first_after(self, since):
        """The index of the first line from a time on: a long job has said much by then."""
        with self.news:
            return bisect.bisect_left(self.lines, (since,))

    def last_step(self):
        with self.news:
            steps = (int(found[1]) for _, line in reversed(self.lines) if (found := STEP.search(line)))
            return next(steps, 0)

    def losses(self):
        """Of every step, the losses it was told with."""
        told = {}
        for _, line in self.lines:
            if found := STEP.search(line):
                told.setdefault(int(found[1]), []).append(float(found[2]))
        return told

    def kill(self, with_signal=signal.SIGKILL):
        if self.process.poll() is None:
            self.process.send_signal(with_signal)
            self.process.wait()


class Cluster:
    """A rendezvous, and agents with one worker each."""

    def __init__(self, nodes, steps, global_batch=GLOBAL_BATCH):
        self.folder = tempfile.TemporaryDirectory()
        self.run = f"faults-{os.getpid()}-{free_port()}"
        self.endpoint = f"127.0.0.1:{free_port()}"
        self.secret = str(Path(self.folder.name) / "secret")
        self.nodes, self.steps, self.global_batch = nodes, steps, global_batch
        trainyard = compare.program("trainyard")
        record = str(Path(self.folder.name) / "record")
        command = [trainyard, "rendezvous", "--rdzv-id", self.run, "--bind", self.endpoint]
        self.server = Process([*command, "--secret-file", self.secret, "--record", record])
        self.server.wait_for("rendezvous of run")
        self.agents = []

    def agent(self):
        place = ["--rdzv-id", self.run, "--rdzv-backend", "c10d", "--rdzv-endpoint", self.endpoint]
        worker = train(self.steps, global_batch=self.global_batch)
        agent = Process(agent_command(self.nodes, place, self.secret, worker))
        self.agents.append(agent)
        return agent

    def close(self):
        for process in [*self.agents, self.server]:
            process.kill()
        self.folder.cleanup()


def first_of(agents, pattern, since=0.0, within=60.0):
    """The time and match of the first line after a time, whoever says it: rank 0 may move."""
    deadline = time.monotonic() + within
    seen = [(agent, agent.first_after(since)) for agent in agents]
    while True:
        news = [(agent, agent.lines[number:]) for agent, number in seen]
        told = [(at, found) for _, lines in news for at, line in lines if (found := re.search(pattern, line))]
        if told:
            return min(told, key=lambda one: one[0])
        seen = [(agent, number + len(lines)) for (agent, number), (_, lines) in zip(seen, news)]
        if time.monotonic() > deadline:
            tails = "\n---\n".join("\n".join(line for _, line in agent.lines[-15:]) for agent in agents)
            raise TooSlow(f"no {pattern!r} within {within} s; the last lines were\n{tails}")
        time.sleep(0.002)


def when_formed(agent, size, since, within=60.0):
    """When an agent was in a world of so many ranks."""
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
        for step, told in agent.losses().items():
            losses.setdefault(step, []).extend(told)
    return losses


def reused_epochs(agents):
    """Epochs that stood for two worlds: with other sizes or stores, or with a rank given twice."""
    worlds, ranks = {}, {}
    for agent in agents:
        for _, line in list(agent.lines):
            if found := PLACE.search(line):
                epoch, rank, *world = found.groups()
                worlds.setdefault(epoch, set()).add(tuple(world))
                ranks.setdefault(epoch, []).append(rank)
    twice = [epoch for epoch in worlds if len(worlds[epoch]) > 1 or len(set(ranks[epoch])) < len(ranks[epoch])]
    return sorted(map(int, twice))


def step_times(agents):
    """Of every step that was told, by the time at which it was: how long it took; none for the first of a world."""
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


def told_steps(agents):
    """Every step with the time at which it was told, in order. Not those of a world that was over by then: an agent that
    stood still passes on what its workers had said before."""
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
    """The steps that count, with the times at which they were told: those that no later world took again."""
    steps = []
    for at, step in told_steps(agents):
        while steps and steps[-1][1] >= step:
            steps.pop()
        steps.append((at, step))
    return steps


def most_lost(agents):
    """The most steps that a new world had to take again."""
    told = told_steps(agents)
    return max((before - step + 1 for (_, before), (_, step) in zip(told, told[1:])), default=0)


def stalls(steps, faults, end):
    """Of each fault, by its time: the longest time between two steps that count, from it until the next fault."""
    times = [at for at, _ in steps]
    longest = [0.0] * len(faults)
    for since, until in zip(times, [*times[1:], end]):
        # The first fault within is the cause; without any, the last one before.
        within = [number for number, at in enumerate(faults) if since <= at < until]
        before = [number for number, at in enumerate(faults) if at < since]
        for cause in within[:1] or before[-1:]:
            longest[cause] = max(longest[cause], until - since)
    return longest


def workers(agent_pid):
    """The processes that an agent's workers are: its children that are engines."""
    found = []
    for task in Path(f"/proc/{agent_pid}/task").glob("*/children"):
        for pid in task.read_text().split():
            try:
                if b"trainyard-engine" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]:
                    found.append(int(pid))
            except OSError:
                pass
    return found


def is_there(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def when_gone(pids, within=30.0):
    deadline = time.monotonic() + within
    while any(is_there(pid) for pid in pids):
        if time.monotonic() > deadline:
            raise TooSlow(f"{[pid for pid in pids if is_there(pid)]} are still there after {within} s")
        time.sleep(0.001)
    return time.monotonic()


def undisturbed(steps, global_batch=GLOBAL_BATCH):
    """The losses of the same job that nobody disturbs, as far as they are compared."""
    command = [compare.program("trainyard"), "run", "--standalone", "--nproc-per-node", "2", "--"]
    at_once = max(size for size in range(1, 9) if global_batch // 2 % size == 0)
    halves = ["--training.local_batch_size", str(at_once)]
    job = Process([*command, *train(min(max(steps, WARMUP), COMPARED), *halves, global_batch=global_batch)])
    job.process.wait()
    job.reader.join()
    return job.losses()


def compare_losses(ours, reference):
    """The largest difference, and over how many steps; losses that nothing stands against differ."""
    steps = [step for step in ours if step in reference]
    if not steps:
        return math.inf, 0
    worst = max(abs(loss - reference[step][0]) for step in steps for loss in ours[step])
    return worst, len(steps)


def percentile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def table(rows, limits):
    """Prints p50, p99 and the largest of every measure, with what it must not exceed."""
    print(f"{'':34}{'p50':>9}{'p99':>9}{'max':>9}{'limit':>9}")
    missed = 0
    for name in rows[0] if rows else []:
        values, limit = [row[name] for row in rows], limits.get(name)
        missed += sum(limit is not None and value > limit for value in values)
        shown = f"{limit:9.3f}" if limit is not None else f"{'':>9}"
        print(f"{name:34}{percentile(values, 0.5):9.3f}{percentile(values, 0.99):9.3f}{max(values):9.3f}{shown}")
    if PULSE.longest > STOOD_STILL:
        print(f"this script itself stood still for {PULSE.longest:.1f} s: the machine was busy, and times are longer")
    return missed


def say(text):
    print(text, flush=True, file=sys.stderr)

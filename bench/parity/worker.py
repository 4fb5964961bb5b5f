"""A worker of bench/parity: records what its launcher gave it, prints marked lines, and ends as it is told.

    worker.py MODE [ARGUMENT ...]

Facts go to $PARITY_FACTS/RANK-ATTEMPT.json, so that they do not depend on how the launcher shows output.
"""

import json
import os
import signal
import sys
import time

MARK = "parity:"


def facts(name):
    return {
        "environment": dict(os.environ),
        "arguments": sys.argv[1:],
        "script": os.path.basename(sys.argv[0]),
        "module": name,
        "python": os.path.realpath(sys.executable),
        "unbuffered": sys.stdout.write_through,
        "session leader": os.getsid(0) == os.getpid(),
        "group leader": os.getpgid(0) == os.getpid(),
        "directory": os.getcwd(),
        "parent is alive": os.getppid() != 1,
        "stdin": sys.stdin.readline() if "read" in sys.argv[1] else "",
        "cpus": sorted(os.sched_getaffinity(0)),
    }


def wait(signals):
    """Waits for a signal, says which one arrived, and exits."""

    def handle(number, _frame):
        print(f"{MARK} got {signal.Signals(number).name}")
        sys.exit(0)

    for name in signals:
        signal.signal(getattr(signal, name), handle)
    print(f"{MARK} ready")
    time.sleep(60)


def fail(error):
    # Imported late: it takes seconds.
    from torch.distributed.elastic.multiprocessing.errors import record

    @record
    def main():
        raise ValueError(error)

    main()


def main():
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    with open(os.path.join(os.environ["PARITY_FACTS"], f"{rank}-{attempt}.json.part"), "w") as file:
        json.dump(facts(__name__), file)
    os.rename(file.name, file.name.removesuffix(".part"))
    # In one write each, or lines of workers mix.
    sys.stdout.write(f"{MARK} out {rank} apple\n")
    sys.stderr.write(f"{MARK} err {rank} pear\n")
    mode, *rest = sys.argv[1].split(":")
    if mode in ("ok", "read") or (mode != "wait" and rank != int(rest[0])):
        # Others end before the one that fails, so that there is one order of events.
        return
    if mode == "wait":
        wait(rest)
    time.sleep(0.5)
    if mode == "exit":
        sys.exit(int(rest[1]))
    if mode == "once" and attempt == 0:
        sys.exit(int(rest[1]))
    if mode == "kill":
        os.kill(os.getpid(), getattr(signal, rest[1]))
    if mode == "raise":
        fail("parity boom")


if __name__ in ("__main__", "worker"):
    main()

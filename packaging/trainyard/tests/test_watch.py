"""Tests of `trainyard.watch`. Scripts run in processes of their own, with a file for the memory of the launcher."""

import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
import unittest
from pathlib import Path

PACKAGES = Path(__file__).resolve().parents[1] / "python"
AUTOSTART = PACKAGES / "trainyard" / "watch" / "autostart"
sys.path.insert(0, str(PACKAGES))

from trainyard.watch import collectives, slot, steps  # noqa: E402

HEADER_BYTES = 4096
DEADLINE_SECONDS = 300
POLL_SECONDS = 0.02


def read(path: Path, rank: int = 0) -> dict | None:
    """Reads a slot as `HeartbeatMemory::read` does."""
    with open(path, "rb") as file:
        file.seek(HEADER_BYTES + rank * slot.SLOT_BYTES)
        lines = file.read(slot.SLOT_BYTES).split(b"\n")
    if not lines[0].startswith(b"{") or len(lines) < 2:
        return None
    if len(lines[1]) == 8 and int(lines[1], 16) != slot.crc32c(lines[0]):
        return None
    return json.loads(lines[0])


class Job:
    """Processes of one script with the environment of `trainyard run --watch`."""

    def __init__(self, test: unittest.TestCase, script: str, world_size: int = 1):
        folder = tempfile.TemporaryDirectory()
        test.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.script = self.folder / "train.py"
        self.script.write_text(textwrap.dedent(script))
        self.memory = self.folder / "memory"
        self.memory.write_bytes(bytes(HEADER_BYTES + world_size * slot.SLOT_BYTES))
        self._test = test

    def start(self, *command: str, rank: int = 0, path: tuple = (AUTOSTART,), **environment: str) -> subprocess.Popen:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            "TRAINYARD_WATCH": "1",
            "TRAINYARD_HEARTBEATS": str(self.memory),
            "TRAINYARD_HEARTBEAT_OFFSET": str(HEADER_BYTES + rank * slot.SLOT_BYTES),
            "RANK": str(rank),
            **environment,
        }
        environment.pop("TRAINYARD_WATCH_OWNER", None)
        command = command or (str(self.script),)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen([sys.executable, *command], env=environment, cwd=self.folder, **pipes)
        self._test.addCleanup(process.communicate)
        self._test.addCleanup(process.kill)
        return process

    def run(self, *command: str, **options) -> str:
        process = self.start(*command, **options)
        output, errors = process.communicate(timeout=DEADLINE_SECONDS)
        self._test.assertEqual(process.returncode, 0, errors)
        self._test.assertNotIn("trainyard.watch", errors)
        return output

    def wait_for(self, condition, *processes: subprocess.Popen, rank: int = 0) -> dict:
        """The first heartbeat of a rank that satisfies a condition."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            heartbeat = read(self.memory, rank)
            if heartbeat and condition(heartbeat):
                return heartbeat
            for process in processes:
                if process.poll() is not None:
                    self._test.fail(process.communicate()[1])
            self._test.assertLess(time.monotonic(), deadline, heartbeat)
            time.sleep(POLL_SECONDS)


class Optimizer:
    """Stands for an optimizer of torch."""

    def __init__(self, rate=None):
        self.param_groups = [{"lr": rate}]


class SlotTest(unittest.TestCase):
    def setUp(self):
        file = tempfile.NamedTemporaryFile()
        self.addCleanup(file.close)
        file.truncate(HEADER_BYTES + slot.SLOT_BYTES)
        self.path = Path(file.name)
        self.slot = slot.Slot(file.name, HEADER_BYTES)

    def test_the_checksum_is_that_of_castagnoli(self):
        self.assertEqual(slot.crc32c(b"123456789"), 0xE3069283)

    def test_a_heartbeat_is_read_as_written(self):
        for heartbeat in ({"step": 12, "position": "train.py:4 in f"}, {"step": 13}):  # the second is shorter
            self.slot.write(heartbeat)
            self.assertEqual(read(self.path), heartbeat)
        self.slot.clear()
        self.assertIsNone(read(self.path))

    def test_a_torn_heartbeat_is_not_read(self):
        self.slot.write({"step": 12})
        with open(self.path, "r+b") as file:
            file.seek(HEADER_BYTES + len('{"step":'))
            file.write(b"9")
        self.assertIsNone(read(self.path))

    def test_a_long_heartbeat_keeps_its_oldest_collectives(self):
        pending = [{"sequence": number, "members": list(range(10_000))} for number in range(8)]
        self.slot.write({"pending": pending, "completed": []})
        kept = read(self.path)["pending"]
        self.assertEqual(kept, pending[: len(kept)])
        self.assertIn(len(kept), range(1, 8))


class StepsTest(unittest.TestCase):
    def setUp(self):
        self.steps = steps.Steps()

    def test_a_step_of_two_optimizers_counts_once(self):
        generator, critic = Optimizer(1e-3), Optimizer()
        for _ in range(20):
            self.steps.after_step(generator)
            for _ in range(5):
                self.steps.after_step(critic)
        self.assertEqual(self.steps.last[0], 20)
        report = self.steps.report()
        self.assertEqual(sum(report["metrics"]["step_times"]["counts"]), 19)
        self.assertEqual(report["metrics"]["learning_rate"], 1e-3)

    def test_another_optimizer_counts_when_the_first_is_out_of_use(self):
        first, second = Optimizer(), Optimizer()
        self.steps.after_step(first)
        for _ in range(20):
            self.steps.after_step(second)
        self.assertGreater(self.steps.last[0], 1)
        self.steps, first = steps.Steps(), Optimizer()
        self.steps.after_step(first)
        del first
        self.steps.after_step(second)
        self.assertEqual(self.steps.last[0], 2)

    def test_the_p99_needs_five_steps(self):
        optimizer = Optimizer()
        for _ in range(5):
            self.steps.after_step(optimizer)
        self.assertIsNone(self.steps.report()["p99_step_ns"])
        self.assertIsNotNone(self.steps.report()["max_step_ns"])
        self.steps.after_step(optimizer)
        self.assertIsNotNone(self.steps.report()["p99_step_ns"])
        self.assertIsNone(self.steps.report()["max_step_ns"])

    def test_a_learning_rate_on_a_device_is_not_read(self):
        self.steps.after_step(optimizer := Optimizer(rate=object()))
        self.assertIsNone(self.steps.report()["metrics"]["learning_rate"])
        del optimizer


class CollectivesTest(unittest.TestCase):
    def test_names_of_operations_have_a_kind(self):
        names = {
            "nccl:_all_gather_base": "all_gather",
            "nccl:ALLGATHER_coalesced": "all_gather",
            "nccl:_reduce_scatter_base": "reduce_scatter",
            "nccl:all_reduce_barrier": "barrier",
            "nccl:allreduce_coalesced": "all_reduce",
            "nccl:_reduce_oop": "reduce",
            "nccl:send 0->1": "send",
            "nccl:recv 0<-1": "recv",
            "gloo:all_to_all": "all_to_all",
            "nccl:coalesced": "other",
        }
        for name, kind in names.items():
            self.assertEqual(collectives.kind(name), kind, name)


class WorkerTest(unittest.TestCase):
    def test_steps_of_a_script_are_counted_and_its_end_is_reported(self):
        script = """
            import torch
            weight = torch.nn.Parameter(torch.ones(2))
            optimizers = [torch.optim.SGD([weight], lr=0.5), torch.optim.AdamW([weight])]
            for _ in range(7):
                weight.grad = torch.ones(2)
                for optimizer in optimizers:
                    optimizer.step()
            print(input())
        """
        job = Job(self, script)
        process = job.start()
        heartbeat = job.wait_for(lambda heartbeat: heartbeat["step"] == 8, process)
        self.assertEqual(heartbeat["stage"], "observed")
        self.assertEqual(heartbeat["metrics"]["learning_rate"], 0.5)
        self.assertLess(abs(heartbeat["written_ns"] - time.time_ns()), DEADLINE_SECONDS * 10**9)
        self.assertEqual(process.communicate("goes on\n")[0], "goes on\n")
        heartbeat = read(job.memory)
        self.assertEqual((heartbeat["stage"], heartbeat["step"]), ("ended", 7))

    def test_an_error_is_no_end(self):
        job = Job(self, "input(); raise ValueError")
        process = job.start()
        job.wait_for(lambda heartbeat: heartbeat["stage"] == "starting", process)
        self.assertIn("ValueError", process.communicate("\n")[1])
        self.assertEqual(read(job.memory)["stage"], "starting")

    def test_the_position_of_a_blocked_main_thread_is_reported(self):
        script = """
            import queue
            def load_batch():
                return queue.Queue().get()
            load_batch()
        """
        job = Job(self, script)
        process = job.start()
        position = job.wait_for(lambda heartbeat: heartbeat["position"], process)["position"]
        self.assertRegex(position, r"^train.py:4 in load_batch \(\w+.py:\d+ in \w+\)$")

    def test_the_rank_that_misses_a_collective_has_none_pending(self):
        script = """
            import os, torch
            from torch import distributed
            distributed.init_process_group("gloo")
            distributed.all_reduce(torch.ones(3))
            if os.environ["RANK"] == "0":
                distributed.all_reduce(torch.ones(5, 7))
            else:
                input()
        """
        job = Job(self, script, world_size=2)
        store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
        ranks = [job.start(rank=rank, **store) for rank in range(2)]
        is_blocked = lambda heartbeat: any(pending["is_blocking"] for pending in heartbeat["pending"])  # noqa: E731
        waiting = job.wait_for(is_blocked, *ranks)
        missing = job.wait_for(lambda heartbeat: heartbeat["completed"], *ranks, rank=1)
        collective = {"kind": "all_reduce", "purpose": "unknown", "group": "world"}
        self.assertEqual(len(waiting["pending"]), 1)
        pending = waiting["pending"][0]
        self.assertEqual(pending["id"], {**collective, "sequence": 2})
        self.assertEqual((pending["members"], pending["shapes"]), ([0, 1], [[5, 7]]))
        self.assertLess(pending["since_ns"], waiting["written_ns"])
        self.assertRegex(waiting["position"], r"^train.py:7 in <module> \(torch/distributed/")
        self.assertEqual(missing["pending"], [])
        self.assertEqual(missing["completed"], [{**collective, "sequence": 1}])
        self.assertRegex(missing["position"], r"^train.py:9 in <module>")

    def test_children_do_not_write(self):
        script = """
            import os, subprocess, sys
            def is_watched():
                import threading
                return any(thread.name == "trainyard.watch" for thread in threading.enumerate())
            print(is_watched())
            if (child := os.fork()) == 0:
                print(is_watched())
                os.pwrite = lambda *_: print("wrote")
                sys.exit()  # with its functions at exit, unlike a worker of a DataLoader
            os.waitpid(child, 0)
            subprocess.run([sys.executable, "-c", "import sys; print('trainyard.watch.writer' in sys.modules)"])
        """
        job = Job(self, script)
        self.assertEqual(job.run("-u", "train.py"), "True\nFalse\nFalse\n")
        self.assertEqual(read(job.memory)["stage"], "ended")

    def test_a_failure_withdraws_the_heartbeat_and_not_the_script(self):
        script = """
            import trainyard.watch.worker as worker
            input()
            worker._writer.after_step(object(), (), {})  # fails: it has no weak references
            worker._writer.after_step(object(), (), {})
            print("goes on")
        """
        job = Job(self, script)
        process = job.start()
        job.wait_for(lambda heartbeat: heartbeat["stage"] == "starting", process)
        output, errors = process.communicate("\n")
        self.assertEqual(output, "goes on\n")
        self.assertEqual(errors.count("trainyard.watch: TypeError"), 1, errors)
        self.assertIsNone(read(job.memory))

    def test_memory_out_of_reach_is_no_error_of_the_script(self):
        job = Job(self, "print('goes on')")
        process = job.start(TRAINYARD_HEARTBEATS="/nonexistent")
        output, errors = process.communicate()
        self.assertEqual((output, process.returncode), ("goes on\n", 0))
        self.assertRegex(errors, r"^trainyard.watch: FileNotFoundError: .*\n$")


class CommandTest(unittest.TestCase):
    SCRIPT = """
        import json, pickle, sys
        class Model: pass
        pickle.dumps(Model())
        print(json.dumps([sys.argv, __name__, __file__, sys.path[0], sys.modules["__main__"].Model is Model]))
    """

    def facts(self, *command: str, path: tuple) -> list:
        job = Job(self, self.SCRIPT)
        facts = json.loads(job.run(*command, path=path))
        heartbeat = read(job.memory)
        self.assertEqual(heartbeat["stage"] if heartbeat else None, "ended" if path else None)
        return json.loads(json.dumps(facts).replace(str(job.folder), "."))

    def test_a_script_runs_as_without_the_watch(self):
        plain = self.facts("train.py", "--lr", "1", path=())
        self.assertEqual(plain, [["train.py", "--lr", "1"], "__main__", "./train.py", ".", True])
        self.assertEqual(self.facts("-m", "trainyard.watch", "train.py", "--lr", "1", path=(PACKAGES,)), plain)
        self.assertEqual(self.facts("train.py", "--lr", "1", path=(AUTOSTART,)), plain)

    def test_a_module_runs_as_without_the_watch(self):
        plain = self.facts("-m", "train", "--lr", "1", path=())
        self.assertEqual(self.facts("-m", "trainyard.watch", "-m", "train", "--lr", "1", path=(PACKAGES,)), plain)

    def test_without_a_launcher_nothing_is_written(self):
        job = Job(self, "print('goes on')")
        output = job.run("-m", "trainyard.watch", "train.py", path=(PACKAGES,), TRAINYARD_HEARTBEATS="")
        self.assertEqual(output, "goes on\n")

    def test_the_next_sitecustomize_is_loaded(self):
        job = Job(self, "import sitecustomize, sys; print(sitecustomize.NAME, sys.path)")
        (job.folder / "other").mkdir()
        (job.folder / "other" / "sitecustomize.py").write_text("NAME = 'the other'")
        output = job.run(path=(AUTOSTART, job.folder / "other"))
        self.assertTrue(output.startswith("the other"), output)
        self.assertNotIn(str(AUTOSTART), output)
        self.assertEqual(read(job.memory)["stage"], "ended")

    def test_torch_is_not_imported_for_the_watch(self):
        job = Job(self, "import sys; print('torch' in sys.modules)")
        self.assertEqual(job.run(), "False\n")


def free_port() -> int:
    """A port that was free a moment ago."""
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


if __name__ == "__main__":
    unittest.main()

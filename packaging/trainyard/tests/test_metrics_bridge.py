"""Tests of trainyard.metrics_bridge; those with the real clients are skipped where these are not installed.

Run: PYTHONPATH=python python3 -m unittest discover tests
"""

import contextlib
import io
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from trainyard import metrics_bridge as bridge

CONFIG = '[training]\nsteps = 60\n\n[metrics]\nlog_freq = 10\n\n[optimizer]\nname = "AdamW"\n'


def installed(*packages):
    for package in packages:
        with contextlib.suppress(PackageNotFoundError):
            return version(package)
    return None


def line(step, loss=1.0, **more):
    return json.dumps({"step": step, "loss": loss, "mfu": None, **more}) + "\n"


class FakeWandb:
    """Keeps what is sent, by run."""

    def __init__(self):
        self.opened, self.rows, self.configs, self.num_finished, self.fails_at = [], [], [], 0, None
        self.defined = []

    def init(self, id, **options):
        self.opened.append({"id": id, **options})
        return self.run(id or f"run{len(self.opened)}")

    def run(self, id):
        config = SimpleNamespace(update=lambda values, allow_val_change: self.configs.append(values))
        return SimpleNamespace(id=id, config=config, log=self.log, finish=self.finish, define_metric=self.define_metric)

    def define_metric(self, name, step_metric=None):
        self.defined.append((name, step_metric))

    def log(self, row, step, commit):
        if self.fails_at == row["step"]:
            raise OSError("no network")
        self.rows.append((step, row))

    def finish(self):
        self.num_finished += 1


class FakeMlflow:
    """The parts of the client that are used; entities are tuples."""

    entities = SimpleNamespace(Metric=lambda *values: values, Param=lambda *values: values)

    def __init__(self):
        self.experiments, self.params, self.metrics, self.statuses, self.batches = [], {}, [], [], []

    def MlflowClient(self):
        return self

    def set_experiment(self, name):
        self.experiments.append(name)
        return SimpleNamespace(experiment_id=name)

    def create_run(self, experiment, run_name):
        self.statuses.append("RUNNING")
        return SimpleNamespace(info=SimpleNamespace(run_id=f"{experiment}/{run_name}"))

    def get_run(self, _id):
        return SimpleNamespace(data=SimpleNamespace(params=self.params))

    def log_batch(self, _id, metrics=(), params=()):
        self.batches.append((len(metrics), len(params)))
        self.metrics.extend(metrics)
        self.params.update(params)

    def update_run(self, _id, status):
        self.statuses.append(status)

    def set_terminated(self, _id):
        self.statuses.append("FINISHED")


class BridgeTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.file = self.folder / "metrics.jsonl"
        for number in (signal.SIGTERM, signal.SIGINT):
            self.addCleanup(signal.signal, number, signal.getsignal(number))

    def write(self, *lines):
        with open(self.file, "a") as file:
            file.write("".join(lines))

    def save_config(self, text=CONFIG, step=20):
        folder = self.folder / "checkpoint" / f"step-{step}"
        folder.mkdir(parents=True)
        manifest = json.dumps({"state": {"config": text}})
        (folder / "manifest.json").write_text(f"trainyard-checkpoint 2 digest\n{manifest}\n")

    def call(self, client, *options, service="wandb"):
        """The exit status, and what was printed as an error."""
        errors, positions, opened = io.StringIO(), [], bridge.Position

        def open_position(path):
            positions.append(opened(path))
            return positions[-1]

        with (
            contextlib.redirect_stderr(errors),
            contextlib.redirect_stdout(io.StringIO()),
            mock.patch.object(bridge, "Position", open_position),
        ):
            status = bridge.main([service, str(self.folder), *options], client)
        for position in positions:  # the lock otherwise lasts as long as the process
            os.close(position.file)
        return status, errors.getvalue()

    def python(self, *options, **environment):
        command = [sys.executable, "-m", "trainyard.metrics_bridge", *options]
        environment = {**os.environ, "PYTHONPATH": str(Path(bridge.__file__).parents[1]), **environment}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, env=environment, cwd=self.folder, **pipes)
        self.addCleanup(process.kill)
        return process


class WandbTest(BridgeTest):
    def test_a_second_call_sends_only_new_lines_to_the_same_run(self):
        client = FakeWandb()
        self.write(line(1), line(10))
        self.assertEqual(self.call(client, "--project", "p", "--name", "n"), (0, ""))
        self.write(line(20, 0.5))
        self.assertEqual(self.call(client), (0, ""))
        self.assertEqual([row["step"] for _, row in client.rows], [1, 10, 20])
        self.assertEqual([step for step, _ in client.rows], [0, 1, 2])
        self.assertEqual([run["id"] for run in client.opened], [None, "run1"])
        self.assertEqual([run["project"] for run in client.opened], ["p", "p"])
        self.assertEqual(client.num_finished, 2)
        self.assertIn(("*", "step"), client.defined)
        self.assertEqual(self.call(client), (0, ""))
        self.assertEqual(len(client.opened), 2, "without new lines the run is not opened")

    def test_the_last_line_of_a_step_counts_and_the_order_of_wandb_grows(self):
        client = FakeWandb()
        self.write(line(10, 3.0), line(20, 2.0), line(30, 1.0), line(20, 2.5), line(30, 1.5))
        self.call(client)
        self.write(line(20, 2.75), line(30, 1.75))
        self.call(client)
        losses = [(row["step"], row["loss"]) for _, row in client.rows]
        self.assertEqual(losses, [(10, 3.0), (20, 2.5), (30, 1.5), (20, 2.75), (30, 1.75)])
        self.assertEqual([step for step, _ in client.rows], [0, 3, 4, 5, 6])

    def test_an_evaluation_joins_its_step(self):
        client = FakeWandb()
        self.write(line(10, 2.0), '{"step":10,"validation_loss":2.5}\n')
        self.call(client)
        self.assertEqual(client.rows, [(1, {"step": 10, "loss": 2.0, "validation_loss": 2.5})])

    def test_a_half_written_line_is_sent_when_it_is_whole(self):
        client = FakeWandb()
        self.write(line(1)[:9])
        self.call(client)
        self.assertEqual(client.opened, [])
        self.write(line(1)[9:], line(10)[:-1])
        self.call(client)
        self.write("\n")
        self.call(client)
        self.assertEqual([(step, row["step"]) for step, row in client.rows], [(0, 1), (1, 10)])

    def test_a_damaged_line_is_left_out_once(self):
        client = FakeWandb()
        self.write(line(1), "\0\0\n", "7\n", '{"loss":1}\n', line(10), "{\n")
        status, errors = self.call(client)
        self.assertEqual((status, errors.count("warning")), (0, 4))
        self.assertEqual([row["step"] for _, row in client.rows], [1, 10])
        self.assertEqual(self.call(client), (0, ""))

    def test_numbers_that_are_not_finite_and_those_of_experts(self):
        client = FakeWandb()
        loads = [{"layer": 3, "rows": [6, 2], "dropped": 2}]
        traffic = {"dispatch": {"seconds": 0.5}}
        self.write(line(1, None, expert_loads=loads, expert_traffic=traffic, text="left out"))
        self.call(client)
        row = client.rows[0][1]
        self.assertTrue(math.isnan(row.pop("loss")))
        self.assertEqual(row, {"step": 1, "experts/layer3/max_over_mean": 1.5, "experts/layer3/dropped_share": 0.25,
                               "expert_traffic/dispatch/seconds": 0.5})

    def test_after_an_error_nothing_is_lost(self):
        client = FakeWandb()
        self.write(*[line(step) for step in range(1, 121)])
        client.fails_at = 75
        status, errors = self.call(client)
        self.assertEqual(status, 1)
        self.assertIn("no network", errors)
        client.fails_at = None
        self.call(client)
        self.assertEqual({step for step, _ in client.rows}, set(range(120)))
        self.assertEqual(client.opened[1]["id"], "run1")
        # A line that is sent again has the step that it had, so that W&B ignores it.
        self.assertTrue(all(step == row["step"] - 1 for step, row in client.rows))

    def test_the_config_of_the_newest_checkpoint_is_sent_once(self):
        client = FakeWandb()
        self.write(line(1))
        self.call(client)
        self.save_config("[training]\nsteps = 5\n", step=9)
        self.save_config()
        self.call(client)
        self.call(client)
        steps = [config["training"]["steps"] if sys.version_info >= (3, 11) else 60 for config in client.configs]
        self.assertEqual(steps, [60])

    def test_a_config_file_replaces_it(self):
        client = FakeWandb()
        self.write(line(1))
        self.save_config()
        file = self.folder / "job.toml"
        file.write_text("[training]\nsteps = 7\n")
        self.call(client, "--config", str(file))
        expected = {"training": {"steps": 7}} if sys.version_info >= (3, 11) else {"toml": file.read_text()}
        self.assertEqual(client.configs, [expected])
        self.assertEqual(self.call(client, "--config", "/none")[0], 1)

    def test_the_manifests_that_trainyard_writes(self):
        fixture = os.environ.get("TRAINYARD_REPOSITORY", str(Path(__file__).parents[3]))
        fixture = Path(fixture, "crates/checkpoint/tests/fixtures/version-2")
        if not fixture.is_dir():
            self.skipTest(f"there is no {fixture}; set TRAINYARD_REPOSITORY")
        config = bridge.read_config(fixture.parent, None)
        self.assertIn("training", str(config))

    def test_what_the_user_can_change_is_said(self):
        client = FakeWandb()
        status, errors = self.call(client)
        self.assertEqual(status, 2)
        self.assertIn("metrics.enable_jsonl", errors)
        self.write(line(1), line(10))
        self.call(client)
        position = bridge.Position(self.folder / "metrics.wandb.json")
        self.assertIn("another process", self.call(client)[1])
        os.close(position.file)
        self.file.write_text(line(1, 5.0))
        self.assertIn("another job", self.call(client)[1])


class FollowTest(BridgeTest):
    def setUp(self):
        super().setUp()
        for name, value in {"POLL_SECONDS": 0.01, "GRACE_SECONDS": 0.1}.items():
            patch = mock.patch.object(bridge, name, value)
            patch.start()
            self.addCleanup(patch.stop)

    def test_it_waits_for_the_file_and_ends_with_the_process(self):
        client, job = FakeWandb(), subprocess.Popen(["sleep", "1"])
        self.addCleanup(job.wait)  # until then it is a zombie

        def train():
            for step in (1, 10):
                time.sleep(0.2)
                self.write(line(step))

        thread = threading.Thread(target=train)
        thread.start()
        self.assertEqual(self.call(client, "--follow", "--pid", str(job.pid)), (0, ""))
        thread.join()
        self.assertEqual([row["step"] for _, row in client.rows], [1, 10])
        self.assertEqual((len(client.opened), client.num_finished), (1, 1))

    @unittest.skipIf(sys.version_info < (3, 11), "Python 3.10 cannot read TOML")
    def test_it_ends_after_the_last_report(self):
        client = FakeWandb()
        self.write(line(50))
        self.save_config()
        timer = threading.Timer(0.4, self.write, [line(60)])
        timer.start()
        self.assertEqual(self.call(client, "--follow"), (0, ""))
        self.assertEqual([row["step"] for _, row in client.rows], [50, 60])

    def test_a_signal_finishes_the_run(self):
        for number in (signal.SIGTERM, signal.SIGINT):
            client = FakeWandb()
            self.write(line(1))
            timer = threading.Timer(0.3, os.kill, [os.getpid(), number])
            timer.start()
            self.assertEqual(self.call(client, "--follow"), (0, ""))
            self.assertEqual((len(client.rows), client.num_finished), (1, 1))


class MlflowTest(BridgeTest):
    def test_metrics_parameters_and_status(self):
        client = FakeMlflow()
        self.write(*[line(step, grad_norm=2.0) for step in range(1, 701)])
        self.save_config()
        self.assertEqual(self.call(client, "--project", "p", "--name", "n", service="mlflow"), (0, ""))
        self.write(line(701))
        self.assertEqual(self.call(client, service="mlflow"), (0, ""))
        self.assertEqual(client.experiments, ["p"])
        self.assertEqual([step for key, _, _, step in client.metrics if key == "loss"], list(range(1, 702)))
        self.assertEqual(client.statuses, ["RUNNING", "FINISHED", "RUNNING", "FINISHED"])
        expected = "60" if sys.version_info >= (3, 11) else None
        self.assertEqual(client.params.get("training.steps"), expected)

    def test_no_request_is_larger_than_mlflow_accepts(self):
        client = FakeMlflow()
        self.write(*[line(step, **{f"metric{i}": 1.0 for i in range(60)}) for step in range(1, 41)])
        self.save_config("".join(f"key{i} = {i}\n" for i in range(250)))
        self.call(client, service="mlflow")
        self.assertTrue(all(metrics <= 1000 and params <= 100 for metrics, params in client.batches))
        self.assertEqual(len(client.metrics), 40 * 61)


class ProgramTest(BridgeTest):
    def test_a_client_that_is_not_installed(self):
        self.write(line(1))
        (self.folder / "wandb").mkdir()  # as W&B leaves it
        for service in ("wandb", "mlflow"):
            if installed(service, f"{service}-skinny"):
                continue
            process = self.python(service, str(self.folder))
            _, errors = process.communicate(timeout=60)
            self.assertEqual(process.returncode, 2)
            self.assertIn(f"pip install {service}", errors)
            self.assertEqual(errors.count("\n"), 1)

    def test_a_client_that_no_python_has(self):
        self.write(line(1))
        (self.folder / "wandb").mkdir()
        command = [sys.executable, "-S", "-m", "trainyard.metrics_bridge", "wandb", str(self.folder)]
        environment = {**os.environ, "PYTHONPATH": str(Path(bridge.__file__).parents[1])}
        done = subprocess.run(command, env=environment, cwd=self.folder, capture_output=True, text=True)
        self.assertEqual(done.returncode, 2)
        self.assertIn("pip install wandb", done.stderr)

    def test_help_has_an_example(self):
        output, _ = self.python("--help").communicate(timeout=60)
        self.assertIn("--follow --pid $!", output)

    @unittest.skipUnless(installed("wandb"), "wandb is not installed")
    def test_wandb_offline(self):
        environment = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
        self.write(line(1), line(10), line(20))
        self.save_config()
        process = self.python("wandb", ".", "--follow", **environment)
        position = self.folder / "metrics.wandb.json"
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline and '"step": 20' not in (position.read_text() if position.exists() else ""):
            time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=90)
        self.assertEqual(process.returncode, 0, errors)
        self.write(line(20, 0.5), line(30))
        process = self.python("wandb", ".", **environment)
        _, errors = process.communicate(timeout=90)
        self.assertEqual(process.returncode, 0, errors)
        run_id = json.loads(position.read_text())["run_id"]
        files = sorted(self.folder.glob(f"wandb/offline-run-*-{run_id}/run-{run_id}.wandb"))
        self.assertEqual(len(files), 2, "a folder per call, with one id")
        data = [file.read_bytes() for file in files]
        self.assertIn(b"loss", data[0])
        self.assertIn(b"AdamW" if sys.version_info >= (3, 11) else b"toml", data[0])

    @unittest.skipUnless(installed("mlflow", "mlflow-skinny") and installed("sqlalchemy"), "MLflow is not installed")
    def test_mlflow_with_sqlite(self):
        import mlflow

        uri = f"sqlite:///{self.folder}/mlflow.db"
        self.write(line(1), line(10, None), '{"step":10,"validation_loss":2.5}\n')
        self.save_config()
        for lines in ([], [line(10, 0.5), line(20, 0.25)]):
            self.write(*lines)
            process = self.python("mlflow", ".", "--project", "p", "--name", "n", MLFLOW_TRACKING_URI=uri)
            _, errors = process.communicate(timeout=180)
            self.assertEqual(process.returncode, 0, errors)
        client = mlflow.MlflowClient(tracking_uri=uri)
        experiment = client.get_experiment_by_name("p")
        (run,) = client.search_runs([experiment.experiment_id])
        self.assertEqual((run.info.run_name, run.info.status), ("n", "FINISHED"))
        history = client.get_metric_history(run.info.run_id, "loss")
        self.assertEqual(sorted(metric.step for metric in history), [1, 10, 10, 20])
        self.assertEqual(run.data.metrics, {"loss": 0.25, "validation_loss": 2.5})
        self.assertIn("60", str(run.data.params))


if __name__ == "__main__":
    unittest.main()

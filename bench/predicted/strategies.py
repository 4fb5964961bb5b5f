"""The strategies for which predictions are compared with measurements, and helpers to run Trainyard."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release" / "trainyard"
CONFIG = ROOT / "configs" / "llama-small.toml"


def strategies(ranks):
    """Yields the name and the config overrides of every strategy."""
    shard = ["--parallelism.data_parallel_shard_degree", "-1", "--parallelism.zero_stage"]
    tensor = ["--parallelism.tensor_parallel_degree", str(ranks), "--parallelism.enable_sequence_parallel"]
    context = ["--parallelism.context_parallel_degree", str(ranks), "--parallelism.context_parallel_method"]
    pipeline = ["--parallelism.pipeline_parallel_degree", str(ranks), "--training.local_batch_size", "1"]
    pipeline += ["--training.global_batch_size", "8", "--parallelism.pipeline_parallel_schedule"]
    yield "ddp", []
    for stage in "123":
        yield f"zero {stage}", [*shard, stage]
    yield "tp", [*tensor, "false"]
    yield "tp, sequence", [*tensor, "true"]
    yield "cp, ring", [*context, "ring"]
    yield "cp, ulysses", [*context, "ulysses"]
    for schedule in ("gpipe", "1f1b", "interleaved", "zb-h1"):
        yield f"pp, {schedule}", [*pipeline, schedule]
    yield "full recomputation", ["--activation_checkpoint.mode", "full"]
    if ranks == 4:
        halves = ["--parallelism.tensor_parallel_degree", "2"]
        yield "tp 2 x zero 3", [*shard, "3", *halves]
        yield "tp 2 x pp 2", [*pipeline[2:], "1f1b", "--parallelism.pipeline_parallel_degree", "2", *halves]


def run(arguments, **options):
    done = subprocess.run(arguments, capture_output=True, text=True, **options)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, arguments))}\n{done.stdout}{done.stderr}")
    return done.stdout


def trained(keys, ranks, steps):
    """Trains for some steps and returns the metrics of every step."""
    with tempfile.TemporaryDirectory() as folder:
        train = [PROGRAM, "train", CONFIG, "--training.steps", str(steps), "--lr_scheduler.warmup_steps", "1"]
        train += ["--metrics.log_freq", "1", "--metrics.enable_jsonl", "true", "--job.dump_folder", folder, *keys]
        launch = [PROGRAM, "run", "--standalone", "--nproc-per-node", str(ranks), "--"]
        run([*launch, *train], env=dict(os.environ, OMP_NUM_THREADS="1"))
        lines = [line for path in Path(folder).rglob("*.jsonl") for line in path.read_text().splitlines()]
        return [json.loads(line) for line in lines]

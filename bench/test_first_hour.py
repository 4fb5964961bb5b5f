"""Tests of bench/gpu/first_hour, without GPUs.  Run: python3 -m unittest discover bench"""

import json
import subprocess
import sys
import tarfile
import tempfile
import unittest
from pathlib import Path

SCRIPT = Path(__file__).parent / "gpu" / "first_hour"


def first_hour(folder: str, *options: str) -> tuple[int, dict]:
    """The exit status and the summary in the archive."""
    archive = Path(folder) / "archive.tar.gz"
    done = subprocess.run([sys.executable, "-B", SCRIPT, *options, "--output", archive], capture_output=True)
    with tarfile.open(archive) as files:
        summary = json.load(files.extractfile("first_hour/summary.json"))
    return done.returncode, summary["stages"]


class FirstHourTest(unittest.TestCase):
    def test_what_one_gpu_cannot_show_is_skipped_with_the_reason(self):
        with tempfile.TemporaryDirectory() as folder:
            status, stages = first_hour(folder, "--gpus", "1", "--only", "overlap", "abort")
        self.assertEqual(status, 0)
        self.assertEqual([stage["status"] for stage in stages.values()], ["skipped", "skipped"])
        self.assertIn("one GPU", stages["overlap"]["reason"])

    def test_a_stage_that_fails_stops_no_other(self):
        with tempfile.TemporaryDirectory() as folder:
            # No command can end in this time.
            options = ["--gpus", "2", "--timeout", "0", "--only", "overlap", "abort"]
            status, stages = first_hour(folder, *options)
        self.assertEqual(status, 1)
        self.assertEqual([stage["status"] for stage in stages.values()], ["failed", "failed"])


if __name__ == "__main__":
    unittest.main()

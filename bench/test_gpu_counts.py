"""Tests of the report of bench/gpu/counts, without training runs.  Run: python3 -m unittest discover bench"""

import sys
import unittest
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import SimpleNamespace

GPU = Path(__file__).parent / "gpu"
sys.path.insert(0, str(GPU))
loader = SourceFileLoader("counts", str(GPU / "counts"))
counts = module_from_spec(spec_from_loader("counts", loader))
loader.exec_module(counts)

DIRECTIONS = [f"{way}_{kind}" for way in ("host_to_device", "device_to_host") for kind in ("pageable", "pinned")]


def tally(calls=0, num_bytes=0):
    return {"calls": calls, "bytes": num_bytes}


def step(host_microseconds=100, pageable=0, segments=0):
    copies = {name: tally() for name in [*DIRECTIONS, "device_to_device"]}
    copies["device_to_host_pageable"] = tally(pageable)
    return {
        "launches": 10,
        "library_launches": 4,
        "host_microseconds": host_microseconds,
        "processor_microseconds": host_microseconds,
        "waiting_microseconds": 0,
        "synchronizations": {"stream": 0, "blocking_copy": pageable},
        "copies": copies,
        "memsets": tally(),
        "pinned_allocations": tally(),
        "segments_allocated": tally(segments),
        "peak_bytes": 3 << 20,
        "nccl": {"all_reduce": tally(2, 5 << 20)},
    }


def summary(*steps, warmup=3):
    return counts.summary(SimpleNamespace(warmup=warmup), {"steps": list(steps), "not_written": []})


class Summary(unittest.TestCase):
    def test_leaves_out_the_warm_up_and_the_last_step(self):
        result = summary(*[step(900)] * 4, step(100), step(300), step(200), step(900), warmup=4)
        self.assertEqual(result["median"]["host_microseconds"], 200)

    def test_sums_what_has_a_limit_over_all_steps_after_the_third(self):
        allocated_late = summary(*[step(segments=5)] * 3, step(segments=1), step(), step(), step(segments=5), warmup=5)
        self.assertEqual(allocated_late["median"]["num_segments_allocated"], 0)
        self.assertEqual(allocated_late["after_step_3"], {"num_pageable_copies": 0, "num_segments_allocated": 1})

    def test_fails_without_a_step_after_the_warm_up(self):
        with self.assertRaises(counts.RunFailed):
            summary(*[step()] * 4)


class Rounds(unittest.TestCase):
    def test_ratios_are_taken_within_a_round_and_limits_over_all(self):
        rounds = [
            {"ours": summary(*[step(100)] * 5), "theirs": summary(*[step(200)] * 5)},
            {"ours": summary(*[step(300, pageable=1)] * 5), "theirs": summary(*[step(400)] * 5)},
        ]
        self.assertEqual(counts.processor_time_ratios(rounds), [0.5, 0.75])
        ours = counts.merged([one["ours"] for one in rounds])
        self.assertEqual(ours["median"]["processor_microseconds"], 200)
        self.assertEqual(ours["after_step_3"]["num_pageable_copies"], 1)


class Table(unittest.TestCase):
    def test_shows_limits_and_what_is_not_zero(self):
        sides = {side: summary(*[step(pageable=1)] * 6) for side in counts.SIDES}
        settings = {"strategy": "ddp", "peer": "PyTorch", "ranks": 2, "arch": 80, "model": "1b", "layers": 4, "seq_len": 8, "local_batch": 1, "steps": 2}
        text = counts.table({**settings, **sides, "ratios_processor_time": [0.5, 0.3], "exceeded": ["num_pageable_copies"]})
        self.assertRegex(text, r"NCCL all reduce, MiB +5 +5\n")
        self.assertRegex(text, r"segments allocated +0 +0\n")
        self.assertIn("processor time, Trainyard over PyTorch: 0.40 (0.30 to 0.50)", text)
        self.assertNotIn("memsets", text)
        self.assertIn("LIMIT EXCEEDED: pageable copies", text)



if __name__ == "__main__":
    unittest.main()

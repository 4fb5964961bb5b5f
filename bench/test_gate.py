"""Tests of the verdict of bench/gate, without training runs.  Run: python3 -m unittest discover bench"""

import unittest
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

loader = SourceFileLoader("gate", str(Path(__file__).parent / "gate"))
gate = module_from_spec(spec_from_loader("gate", loader))
loader.exec_module(gate)


def verdict(ratios, loss_difference=0.0):
    rounds = [{"ratio": ratio, "loss_difference": loss_difference} for ratio in ratios]
    return gate.verdict("tiny ddp 2", rounds, tolerance=0.02, loss_tolerance=1e-5)


class Verdict(unittest.TestCase):
    def test_a_slowdown_in_every_round_fails(self):
        found = verdict([1.03, 1.10, 1.05])
        self.assertEqual(found["verdict"], "slower")
        self.assertEqual(found["ratio"], 1.05)

    def test_a_slowdown_in_all_rounds_but_one_is_noise(self):
        self.assertEqual(verdict([1.30, 1.20, 1.01])["verdict"], "ok")

    def test_other_losses_fail_even_if_they_are_not_numbers(self):
        self.assertEqual(verdict([0.9, 0.9], 1e-3)["verdict"], "other losses")
        difference = gate.largest_difference([1.0, None], [1.0, None])
        self.assertEqual(verdict([0.9, 0.9], difference)["verdict"], "other losses")
        self.assertEqual(gate.largest_difference([1.0, 2.0], [1.0, 2.5]), 0.5)


if __name__ == "__main__":
    unittest.main()

"""Tests of the report of bench/compare, without training runs.  Run: python3 -m unittest discover bench"""

import unittest
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

from programs import RunFailed, result_line

loader = SourceFileLoader("compare", str(Path(__file__).parent / "compare"))
compare = module_from_spec(spec_from_loader("compare", loader))
loader.exec_module(compare)


def result(step_ms=100.0, peak=(700.0, 720.0), before=(600.0, 600.0), losses=(7.0, 6.9), norms=(1.0, 1.1)):
    return {
        "tokens_per_s": 1e6 / step_ms,
        "step_ms_median": step_ms,
        "cpu_ms_per_step_per_rank": [80.0, 120.0],
        "main_running_ms_per_step_per_rank": [0.5 * step_ms, 0.7 * step_ms],
        "main_waiting_for_core_ms_per_step_per_rank": [10.0, 0.0],
        "other_threads_ms_per_step_per_rank": [20.0, 20.0],
        "minor_faults_per_step_per_rank": [7.0, 9.0],
        "peak_rss_mb_per_rank": list(peak),
        "rss_mb_before_model_per_rank": list(before),
        "comm_bytes_per_step_per_rank": {"sent": [10, 12], "received": [12, 10]},
        "losses": list(losses),
        "grad_norms": list(norms),
    }


def make_report(*rounds):
    args = compare.parse_args(["--rounds", str(len(rounds))])
    return compare.report(args, [dict(zip(("theirs", "ours", "bare"), r)) for r in rounds])


class ReportTest(unittest.TestCase):
    def test_result_line_skips_a_rank_prefix_and_later_output(self):
        text = '[rank0]: {"losses": [1]}\n[rank1]: goodbye\n{not json}\n'
        self.assertEqual(result_line(text), {"losses": [1]})
        self.assertIsNone(result_line("nothing here\n"))

    def test_a_step_beyond_bare_is_the_sum_of_its_parts(self):
        parts = make_report((result(300.0), result(200.0), result(100.0)))["beyond_bare"]["ours"]
        main = sum(value for name, value in parts.items() if name.startswith("main_"))
        self.assertEqual(parts["step_ms"], 100.0)
        self.assertAlmostEqual(main, parts["step_ms"])
        self.assertAlmostEqual(parts["main_running_ms"], 60.0)

    def test_ratios_are_the_median_of_ratios_within_a_round(self):
        slow, fast = result(200.0), result(100.0)
        r = make_report((slow, fast, fast), (fast, fast, fast), (slow, slow, slow))
        self.assertEqual([one["ratio_throughput"] for one in r["per_round"]], [2.0, 1.0, 1.0])
        self.assertEqual((r["ratio_throughput"], r["verdict"]), (1.0, "ok"))

    def test_memory_is_the_largest_increase_of_any_rank(self):
        lean = result(peak=(150.0, 160.0), before=(100.0, 100.0))
        self.assertEqual(make_report((result(), lean, result()))["ratio_peak_memory"], 0.5)

    def test_cpu_time_is_the_sum_over_ranks(self):
        self.assertAlmostEqual(make_report((result(), result()))["cpu_seconds_per_step"]["ours"], 0.2)

    def test_a_strategy_without_bare_has_no_ratio_to_bare(self):
        self.assertIsNone(make_report((result(), result()))["ratio_to_bare"])

    def test_verdicts(self):
        self.assertEqual([compare.verdict(x) for x in (1.0, 0.999, 0.97, 0.969)], ["ok", "close", "close", "miss"])

    def test_a_wrong_gradient_scale_is_detected_if_losses_agree(self):
        r = make_report((result(), result(norms=(2.0, 2.2))))
        self.assertEqual((r["max_loss_difference"], r["agrees"]), (0.0, False))
        self.assertAlmostEqual(r["max_grad_norm_difference"], 1.0)

    def test_nan_is_not_agreement(self):
        self.assertFalse(make_report((result(), result(losses=(7.0, float("nan")))))["agrees"])

    def test_a_missing_step_is_not_agreement(self):
        with self.assertRaisesRegex(RunFailed, "losses: ours has 1 steps, theirs 2"):
            make_report((result(), result(losses=(7.0,))))


if __name__ == "__main__":
    unittest.main()

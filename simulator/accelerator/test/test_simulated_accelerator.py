#!/usr/bin/env python3
"""Runs the test programs of the simulated accelerator and asserts on what they print.

The programs are built by ../build into the directory that SIMULATED_ACCELERATOR_BUILD names (or a directory in the
user's cache), which takes minutes the first time. The tests themselves take less than a minute.
"""

import os
import pathlib
import signal
import subprocess
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
BUILD = pathlib.Path(
    os.environ.get("SIMULATED_ACCELERATOR_BUILD", pathlib.Path.home() / ".cache/trainyard/simulator/accelerator")
)
ASYNC = {"TRAINYARD_SIM_ASYNC": "1", "TRAINYARD_SIM_JITTER_US": "300"}


def setUpModule():
    subprocess.run([HERE.parent / "build", BUILD, "--tests"], check=True)


def environment(changes):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TRAINYARD_SIM_")}
    # One thread per process: two processes share the machine, and sums do not depend on the number of threads.
    return {**kept, "OMP_NUM_THREADS": "1", **changes}


class Case(unittest.TestCase):
    def one_process(self, case, status=0, **settings):
        done = subprocess.run(
            [BUILD / "one_process", case],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            env=environment(settings),
        )
        self.assertEqual(done.returncode, status, done.stdout)
        self.assertNotIn("FAILED", done.stdout)
        return done.stdout

    def two_ranks(self, case, **settings):
        with tempfile.TemporaryDirectory() as directory:
            ranks = [
                subprocess.Popen(
                    [BUILD / "two_ranks", case, str(rank), os.path.join(directory, "store")],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    env=environment(settings),
                )
                for rank in range(2)
            ]
            try:
                outputs = [rank.communicate(timeout=60)[0] for rank in ranks]
            finally:
                for rank in ranks:
                    rank.kill()
        for rank, output in zip(ranks, outputs):
            self.assertEqual(rank.returncode, 0, "\n".join(outputs))
            self.assertNotIn("FAILED", output)
        return outputs

    def assert_clean(self, output):
        self.assertIn("ok: ", output)
        for word in ("hazard:", "caught:", "died:"):
            self.assertNotIn(word, output)


class Values(Case):
    def test_training_equals_cpu(self):
        self.assert_clean(self.one_process("training_equals_cpu"))
        self.assert_clean(self.one_process("training_equals_cpu", **ASYNC))

    def test_attention(self):
        self.assert_clean(self.one_process("attention"))
        self.assert_clean(self.one_process("packed_attention"))

    def test_operators(self):
        for settings in ({}, ASYNC):
            self.assert_clean(self.one_process("operators_equal_cpu", **settings))

    def test_generator(self):
        self.assert_clean(self.one_process("generator"))

    def test_operator_without_cuda_kernel(self):
        output = self.one_process("operator_without_cuda_kernel")
        self.assertIn("caught: Could not run 'aten::_scaled_dot_product_flash_attention_for_cpu' with arguments from "
                      "the 'CUDA' backend: CUDA has no kernel for it", output)


class Streams(Case):
    def test_host_runs_ahead(self):
        self.assert_clean(self.one_process("host_runs_ahead", TRAINYARD_SIM_ASYNC="1"))

    def test_event_orders(self):
        for settings in ({}, ASYNC):
            self.assert_clean(self.one_process("ordered_by_event", **settings))
            self.assert_clean(self.one_process("disjoint_ranges", **settings))

    def test_missing_event(self):
        for settings in ({}, ASYNC):
            output = self.one_process("missing_event", **settings)
            self.assertIn("caught: simulated accelerator: stream race on cuda:0: aten::mul.out on stream 1 reads 4096 "
                          "bytes that aten::fill_.Scalar on stream 0 writes", output)
            self.assertIn("no event orders stream 1 after stream 0", output)
            self.assertIn("hazard: stream race", output)


class Memory(Case):
    def test_counters(self):
        self.assert_clean(self.one_process("memory_is_counted"))

    def test_out_of_memory(self):
        output = self.one_process("out_of_memory", TRAINYARD_SIM_MEMORY="2000000")
        self.assertIn("caught: CUDA out of memory. Tried to allocate 4194304 bytes. GPU 0", output)

    def test_missing_record_stream(self):
        for settings in ({}, ASYNC):
            output = self.one_process("missing_record_stream", **settings)
            self.assertIn("caught: simulated accelerator (found before this call): freed while in use on cuda:0",
                          output)
            self.assertIn("aten::sum.IntList_out on stream 1 may still read it; record_stream is missing, and no event "
                          "orders stream 0 after stream 1", output)

    def test_freed_while_another_stream_writes(self):
        output = self.one_process("free_under_writer")
        self.assertIn("is freed while aten::fill_.Scalar on stream 1 may still write it", output)

    def test_record_stream_and_events_allow_the_free(self):
        for case in ("with_record_stream", "ordered_before_free"):
            output = self.one_process(case)
            self.assertIn("not caught", output)
            self.assertNotIn("hazard", output)
        self.assert_clean(self.one_process("recorded_memory_is_kept"))

    def test_use_after_release(self):
        self.assertIn("use after free: aten::add.out on stream 0 reads 64 bytes", self.one_process("use_after_release"))


class Devices(Case):
    def test_wrong_device_in_thread(self):
        output = self.one_process("wrong_device_in_thread")
        self.assertIn("wrong device: aten::fill_.Scalar on stream 0 writes a tensor of cuda:1 whose memory", output)
        self.assertIn("belongs to cuda:0; it was allocated without a device guard", output)

    def test_two_devices(self):
        self.assertIn("caught: Expected all tensors to be on the same device",
                      self.one_process("two_devices_in_one_kernel"))

    def test_cpu_tensor(self):
        output = self.one_process("cpu_tensor_in_kernel")
        self.assertIn("ok: a 0-dimensional CPU tensor is a value", output)
        self.assertEqual(output.count("caught: Expected all tensors to be on the same device, but found at least two "
                                      "devices, cuda:0 and cpu!"), 2, output)


class Host(Case):
    def test_host_read(self):
        output = self.one_process("host_read", status=-signal.SIGSEGV)
        self.assertIn("simulated accelerator: host access to device memory of cuda:0", output)

    def test_pinned(self):
        for case in ("pinned_too_early", "pinned_overwritten"):
            output = self.one_process(case, status=-signal.SIGSEGV)
            self.assertIn("host access to pinned memory that an asynchronous copy may still use", output)
        self.assert_clean(self.one_process("pinned_after_event"))

    def test_forbidden_synchronization(self):
        output = self.one_process("forbidden_synchronization")
        for text in ("aten::_local_scalar_dense makes the host wait for the device (item)",
                     "aten::copy_ makes the host wait for the device (copy to host)",
                     "aten::nonzero makes the host wait for the device (dynamic shape)",
                     "Stream::synchronize makes the host wait for the device (stream synchronize)"):
            self.assertIn("host synchronization is forbidden here: " + text, output)
        self.assertNotIn("not caught", output)

    def test_counted_synchronizations(self):
        output = self.one_process("synchronizations_are_counted")
        for cause in ("item", "copy to host", "dynamic shape", "stream synchronize", "device synchronize"):
            self.assertIn(f"{cause}: 1", output)


class Collectives(Case):
    def test_wait_does_not_block(self):
        for output in self.two_ranks("wait_does_not_block"):
            self.assert_clean(output)

    def test_values(self):
        for settings in ({}, ASYNC):
            for case in ("reductions", "movements", "exchange_coalesced", "data_parallel"):
                for output in self.two_ranks(case, **settings):
                    self.assert_clean(output)

    def test_semantics(self):
        for case in ("dropped_work", "barrier_blocks_the_host", "future_orders_streams"):
            for output in self.two_ranks(case):
                self.assert_clean(output)
        self.assert_clean(self.two_ranks("tags_are_ignored")[1])
        for output in self.two_ranks("exchange_coalesced", CONNECT_EAGERLY="1"):
            self.assert_clean(output)

    def test_missing_wait(self):
        for settings in ({}, ASYNC):
            for rank, output in enumerate(self.two_ranks("missing_wait", **settings)):
                self.assertIn(f"stream race on cuda:{rank}: aten::mul.out on stream 0 reads 16 bytes that ALLREDUCE on "
                              "stream 1 writes", output)
                self.assertIn("no event orders stream 0 after stream 1", output)

    def test_wait_on_another_stream(self):
        for output in self.two_ranks("wait_on_another_stream"):
            self.assertIn("no event orders stream 0 after stream 1", output)

    def test_write_under_collective(self):
        for output in self.two_ranks("write_under_collective"):
            self.assertIn("aten::add.out on stream 0 writes 16 bytes that _ALLGATHER_BASE on stream 1 reads", output)

    def test_cpu_tensor(self):
        for output in self.two_ranks("cpu_tensor"):
            self.assertIn("caught: Tensors must be CUDA and dense", output)

    def test_order_differs(self):
        first, second = self.two_ranks("order_differs")
        self.assertIn("collective order differs between ranks: collective 0 is ALLREDUCE(Float, 4 elements, SUM) on "
                      "rank 0 but BROADCAST(Float, 4 elements, root 0) on rank 1", first)
        self.assertIn("is BROADCAST(Float, 4 elements, root 0) on rank 1 but ALLREDUCE(Float, 4 elements, SUM) on "
                      "rank 0", second)
        self.assertIn("caught: NCCL communicator of group 'pair' failed before", first)
        self.assertIn("ALLREDUCE(Float, 4 elements, SUM) on rank 0 but ALLREDUCE(Float, 8 elements, SUM) on rank 1",
                      self.two_ranks("counts_differ")[0])

    def test_crossed_sends(self):
        for settings in ({}, {"CONNECT_EAGERLY": "1"}):
            outputs = self.two_ranks("crossed_sends", **settings)
            self.assertIn("NCCL operation SEND to rank 1 of group 'pair' failed on rank 0", outputs[0])
            self.assertIn("NCCL operation SEND to rank 0 of group 'pair' failed on rank 1", outputs[1])
            # The rank whose timeout comes first closes the connection, which is the other's error.
            self.assertIn("Timed out", "".join(outputs))
            self.assertIn("deadlocks unless its messages are coalesced", "".join(outputs))

    def test_message_sizes_differ(self):
        for output in self.two_ranks("message_sizes_differ"):
            self.assertIn("rank 0 sends 4 elements of Float, rank 1 receives 8 elements of Float", output)

    def test_forbidden_barrier(self):
        for output in self.two_ranks("forbidden_barrier"):
            self.assertIn("host synchronization is forbidden here: barrier", output)

    def test_abort(self):
        output = self.two_ranks("abort_frees_waiters")[0]
        self.assertIn("ok: the host waits no longer than until the abort", output)
        self.assertIn("caught: the group was aborted", output)
        self.assertIn("caught: NCCL communicator was aborted on rank 0", output)
        self.assertNotIn("hazard", output)


if __name__ == "__main__":
    unittest.main()

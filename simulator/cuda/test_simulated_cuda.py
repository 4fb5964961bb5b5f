"""Tests of the simulated CUDA libraries, through the real libtorch. Run with the Python that has libtorch's CUDA build:

    python -m unittest discover simulator/cuda

TRAINYARD_SIMULATED_CUDA may name a directory of built libraries; without it they are built first.
"""
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import threading
import unittest

HERE = pathlib.Path(__file__).resolve().parent
TIMEOUT = 120  # seconds, for a machine that is busy; nothing is judged by it

COMMON = """
import ctypes, json, os, sys, threading
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
"""
RANKS = COMMON + """
rank, peer = int(os.environ["RANK"]), 1 - int(os.environ["RANK"])
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
dist.init_process_group("nccl", init_method=os.environ["MEETING"], rank=rank, world_size=2, device_id=device)
"""


def setUpModule():
    global libraries
    if given := os.environ.get("TRAINYARD_SIMULATED_CUDA"):
        libraries = pathlib.Path(given)
        if not any(libraries.glob("libcudart.so*")):
            raise RuntimeError(f"TRAINYARD_SIMULATED_CUDA={given} holds no libraries")
        return
    libraries = pathlib.Path(tempfile.gettempdir(), f"trainyard-simulated-cuda-{os.getuid()}")
    subprocess.run([HERE / "build", sysconfig.get_path("purelib"), libraries], check=True, stdout=subprocess.DEVNULL)


def start(script, *options, **environment):
    """Starts Python on the simulated libraries."""
    settings = {
        **os.environ,
        "LD_PRELOAD": ":".join(str(p) for p in sorted(libraries.glob("*.so*"))),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100",  # by default the watchdog waits for a minute before it ends a process
        **environment,
    }
    command = [sys.executable, *options, "-c", textwrap.dedent(script)]
    return subprocess.Popen(command, env=settings, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process):
    """The process's output and errors; it must end by itself."""
    try:
        return process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError("a process did not end:\n" + "".join(process.communicate()))


class Case(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.directory = pathlib.Path(temporary.name)

    def alone(self, script, **environment):
        """Runs a script that must succeed, and returns what it printed."""
        process = start(COMMON + textwrap.dedent(script), **environment)
        output, errors = finish(process)
        self.assertEqual(process.returncode, 0, output + errors)
        return output

    def start_ranks(self, script, **environment):
        """Starts a script on two ranks with a device each."""
        meeting = f"file://{self.directory}/meeting"
        processes = [start(RANKS + textwrap.dedent(script), RANK=str(r), MEETING=meeting, TRAINYARD_SIM_GPUS="2", **environment) for r in range(2)]
        for process in processes:
            self.addCleanup(self.end, process)
        return processes

    def end(self, process):
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            stream.close()

    def ranks(self, script, **environment):
        """Runs a script that must succeed on both ranks; returns what each printed."""
        outputs = []
        for process in self.start_ranks(script, **environment):
            output, errors = finish(process)
            self.assertEqual(process.returncode, 0, output + errors)
            outputs.append(output)
        return outputs


class OneDevice(Case):
    def test_operators(self):
        """Operators of a training step find their kernels and give the right shapes and devices."""
        self.alone("""
            assert ctypes.CDLL(None).trainyard_simulated_cuda() == 1
            assert torch.cuda.device_count() == 3 and torch.cuda.get_device_capability() == (8, 0)
            model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64)).cuda()
            for implementation in ("fused", "foreach"):
                optimizer = torch.optim.AdamW(model.parameters(), **{implementation: True})
                model(torch.randn(8, 64, device="cuda")).sum().backward()
                optimizer.step()
                assert all(p.grad.is_cuda for p in model.parameters())

            for dtype, name in ((torch.bfloat16, "Flash"), (torch.float32, "Efficient")):
                q = torch.randn(2, 4, 128, 64, device="cuda", dtype=dtype, requires_grad=True)
                out = F.scaled_dot_product_attention(q, q, q, is_causal=True)
                assert name in type(out.grad_fn).__name__, out.grad_fn
                out.sum().backward()

            x, experts = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in ((32, 64), (4, 64, 32)))
            ends = torch.tensor([8, 16, 24, 32], dtype=torch.int32).cuda()
            assert torch._grouped_mm(x, experts, ends).shape == (32, 32)
            image = torch.randn(2, 3, 16, 16, device="cuda")
            convolution = nn.Conv2d(3, 8, 3).cuda()
            convolution(image).sum().backward()
            assert convolution.weight.grad.shape == (8, 3, 3, 3)
            assert torch.nonzero(x > 0).shape == (0, 2)  # the count would come from a kernel
            assert torch.ones(2, device="cuda:2").device.index == 2
            """, TRAINYARD_SIM_GPUS="3")  # fmt: skip

    def test_copies_streams_and_events(self):
        """Copies are real, pinned memory is told apart, and streams and events answer."""
        self.alone("""
            x = torch.arange(1000.0).pin_memory()
            assert x.is_pinned() and not torch.arange(3).is_pinned()
            y = x.cuda(non_blocking=True)
            z = torch.empty_like(y)
            z.copy_(y)
            assert torch.equal(z.cpu(), x) and torch.equal(z[10:20].cpu(), x[10:20])
            back = torch.empty(1000, pin_memory=True)
            back.copy_(z, non_blocking=True)
            torch.cuda.synchronize()
            assert torch.equal(back, x)
            assert (z + 1)[:4].tolist() == [0.0] * 4  # a kernel's result is unknown, and small reads of it are zeros

            stream, first, second = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            with torch.cuda.stream(stream):
                stream.wait_event(first)
                second.record()
            second.synchronize()
            assert first.query() and second.query() and stream.query() and first.elapsed_time(second) >= 0
            """)  # fmt: skip

    def test_errors_are_libtorchs_own(self):
        self.alone("""
            def message(kind, action):
                try:
                    action()
                except kind as error:
                    return str(error)
                raise AssertionError("no error")

            full = message(torch.OutOfMemoryError, lambda: torch.empty(3 << 30, dtype=torch.uint8, device="cuda"))
            assert "CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total capacity of 2.00 GiB" in full, full
            held = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
            assert torch.cuda.mem_get_info() == (1 << 30, 2 << 30)
            mixed = message(RuntimeError, lambda: torch.ones(2).cuda() + torch.ones(2, 2))
            assert "Expected all tensors to be on the same device" in mixed, mixed
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(torch.cuda.Stream()):
                assert "the simulated GPU does not do this" in message(RuntimeError, graph.capture_begin)
            assert "invalid" in message(RuntimeError, lambda: torch.cuda.set_device(1))
            """, TRAINYARD_SIM_MEMORY=str(2 << 30))  # fmt: skip

    def test_expandable_segments_and_sm_90(self):
        self.alone("""
            assert torch.cuda.get_device_capability() == (9, 0)
            q = torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            out = F.scaled_dot_product_attention(q, q, q, is_causal=True)
            assert "Flash" in type(out.grad_fn).__name__, out.grad_fn

            blocks = [torch.empty(300 << 20, dtype=torch.uint8, device="cuda") for _ in range(3)]
            assert blocks[1].data_ptr() - blocks[0].data_ptr() == 300 << 20, "one segment that grows"
            across = torch.arange(100 << 18, dtype=torch.int32)  # 100 MiB: several of the pieces that a segment is mapped from
            assert torch.equal(across.cuda().cpu(), across)
            del blocks, q, out
            torch.cuda.empty_cache()
            assert torch.cuda.mem_get_info()[0] > 79 << 30
            """, TRAINYARD_SIM_ARCH="90", PYTORCH_ALLOC_CONF="expandable_segments:True")  # fmt: skip

    def test_host_access_dies_with_a_message(self):
        process = start(COMMON + "x = torch.ones(4).cuda(); print(hex(x.data_ptr()), flush=True); ctypes.string_at(x.data_ptr(), 4)")
        output, errors = finish(process)
        self.assertEqual(process.returncode, -signal.SIGSEGV)
        self.assertIn(f"simulated CUDA: the host read or wrote device memory at {output.strip()} of device 0", errors)

    def test_other_faults_reach_the_handler_before(self):
        process = start(COMMON + "x = torch.ones(4).cuda(); ctypes.string_at(16, 4)", "-X", "faulthandler")
        _, errors = finish(process)
        self.assertEqual(process.returncode, -signal.SIGSEGV)
        self.assertIn("Fatal Python error: Segmentation fault", errors)
        self.assertNotIn("simulated CUDA", errors)

    def test_report(self):
        """The counts of a program that is known call by call."""
        path = self.directory / "report-%r.json"
        self.alone("""
            begin, end = torch.cuda.cudart().cudaProfilerStart, torch.cuda.cudart().cudaProfilerStop
            host, pinned = torch.ones(256), torch.ones(64).pin_memory()
            begin()
            x = host.cuda()
            begin()
            y = x + 1
            x.copy_(y)
            begin()
            x[:64].copy_(pinned, non_blocking=True)
            y.cpu()
            torch.cuda.synchronize()
            end()
            x + 1
            """, TRAINYARD_SIM_REPORT=str(path), RANK="3")  # fmt: skip
        report = json.loads((self.directory / "report-3.json").read_text())
        first, second, third = report["steps"]
        nothing = {"calls": 0, "bytes": 0}
        self.assertEqual(report["rank"], 3)
        self.assertEqual(len(report["devices"]), 1)
        self.assertEqual(report["not_written"], [])
        self.assertEqual(first["launches"], 0)
        self.assertEqual(first["copies"]["host_to_device_pageable"], {"calls": 1, "bytes": 1024})
        self.assertEqual(first["segments_allocated"], {"calls": 1, "bytes": 2 << 20})
        self.assertEqual(first["peak_bytes"], 2 << 20)
        self.assertEqual(first["synchronizations"], {"stream": 1, "event": 0, "device": 0, "blocking_copy": 0})
        self.assertEqual(second["launches"], 1)
        self.assertEqual(second["copies"]["device_to_device"], {"calls": 1, "bytes": 1024})
        self.assertEqual(second["copies"]["host_to_device_pageable"], nothing)
        self.assertEqual(second["segments_allocated"], nothing)
        self.assertEqual(sum(second["synchronizations"].values()), 0)
        self.assertEqual(third["copies"]["host_to_device_pinned"], {"calls": 1, "bytes": 256})
        self.assertEqual(third["copies"]["device_to_host_pageable"], {"calls": 1, "bytes": 1024})
        self.assertEqual(third["synchronizations"], {"stream": 1, "event": 0, "device": 1, "blocking_copy": 1})
        self.assertEqual(report["total"]["launches"], 2)
        self.assertEqual(report["total"]["pinned_allocations"]["calls"], 1)


class TwoRanks(Case):
    def test_training(self):
        """The real ProcessGroupNCCL under DDP and fully_shard, and values of small collectives and messages."""
        path = self.directory / "report-%r.json"
        self.ranks("""
            from torch.distributed.fsdp import fully_shard

            def model():
                return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).cuda()

            def train(model):
                optimizer = torch.optim.AdamW(model.parameters(), fused=True)
                for _ in range(3):
                    torch.cuda.cudart().cudaProfilerStart()
                    model(torch.randn(4, 64, device="cuda")).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    torch.cuda.synchronize()
                torch.cuda.cudart().cudaProfilerStop()

            train(nn.parallel.DistributedDataParallel(model(), device_ids=[rank]))
            sharded = model()
            for layer in (sharded[0], sharded[2], sharded):
                fully_shard(layer)
            train(sharded)

            def tensor(*values, dtype=torch.float32):
                return torch.tensor(values, dtype=dtype).cuda()

            total, mean, most = tensor(rank + 1.0), tensor(rank + 1.0, dtype=torch.bfloat16), tensor(rank * 7, 3, dtype=torch.int64)
            dist.all_reduce(total)
            assert total.item() == 3
            dist.all_reduce(mean, op=dist.ReduceOp.AVG)
            assert mean.item() == 1.5
            dist.all_reduce(most, op=dist.ReduceOp.MAX)
            assert most.tolist() == [7, 3]
            all = torch.empty(4, device="cuda")
            dist.all_gather_into_tensor(all, tensor(rank, rank + 10.0))
            assert all.tolist() == [0, 10, 1, 11]
            dist.broadcast(total := tensor(rank + 5.0), src=1)
            assert total.item() == 6
            dist.all_to_all_single(other := torch.empty(2, device="cuda"), tensor(rank * 10.0, rank * 10.0 + 1))
            assert other.tolist() == [rank, rank + 10]
            # In the order of the stream: the copy to pinned memory waits for the collective, the host waits for the event.
            pinned, event = torch.empty(1, pin_memory=True), torch.cuda.Event()
            dist.all_reduce(total := tensor(rank + 1.0))
            pinned.copy_(total, non_blocking=True)
            event.record()
            event.synchronize()
            assert pinned.item() == 3
            dist.destroy_process_group()
            """, TRAINYARD_SIM_REPORT=str(path))  # fmt: skip
        for rank in range(2):
            report = json.loads((self.directory / f"report-{rank}.json").read_text())
            ddp, sharded = report["steps"][1]["nccl"], report["steps"][4]["nccl"]
            parameter_bytes = 4 * 2 * (64 * 64 + 64)
            self.assertEqual(ddp["all_reduce"], {"calls": 1, "bytes": parameter_bytes})
            self.assertGreaterEqual(sharded["all_gather"]["bytes"], parameter_bytes)
            self.assertEqual(sharded["reduce_scatter"], {"calls": 2, "bytes": parameter_bytes})
            self.assertEqual(report["not_written"], [])

    def test_mismatched_collectives(self):
        processes = self.start_ranks("""
            if rank == 0:
                dist.all_reduce(torch.empty(1024, device="cuda"))
            else:
                part = torch.empty(512, dtype=torch.bfloat16, device="cuda")
                dist.all_gather_into_tensor(torch.empty(1024, dtype=torch.bfloat16, device="cuda"), part)
            torch.cuda.synchronize()  # the rank that came first learns of it from the watchdog
            """)  # fmt: skip
        errors = [finish(process)[1] for process in processes]
        text = r"collective 1 of communicator \w+: rank 0 called all_reduce\(1024 x float32, sum\), rank 1 called all_gather\(512 x bfloat16\)"
        for process, error in zip(processes, errors):
            self.assertNotEqual(process.returncode, 0)
            self.assertRegex(error, text)
        said = re.findall("^simulated CUDA: " + text, "".join(errors), re.MULTILINE)
        self.assertEqual(len(said), 1, "said once by the simulator itself")

    def test_mismatched_messages(self):
        processes = self.start_ranks("""
            if rank == 0:
                dist.send(torch.empty(4, device="cuda"), peer)
            else:
                dist.recv(torch.empty(8, device="cuda"), peer)
            torch.cuda.synchronize()
            """)  # fmt: skip
        errors = "".join(finish(process)[1] for process in processes)
        self.assertRegex(errors, r"rank 0 called send\(4 x float32, to rank 1\), rank 1 called recv\(8 x float32, from rank 0\)")

    def test_crossed_messages(self):
        """Messages of a group cross; single ones wait for each other forever, and the simulator says so."""
        processes = self.start_ranks("""
            x, y = torch.tensor([rank + 1.0]).cuda(), torch.empty(1, device="cuda")
            for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, y, peer)]):
                work.wait()
            assert y.item() == peer + 1
            works = [dist.isend(x, peer), dist.irecv(y, peer)]
            input()  # until the simulator has spoken
            assert not any(work.is_completed() for work in works)
            dist.distributed_c10d._abort_process_group()
            torch.cuda.synchronize()
            print("free")
            """)  # fmt: skip
        spoken, errors = threading.Event(), ["", ""]

        def read(index):
            for line in processes[index].stderr:
                errors[index] += line
                if "deadlock in communicator" in line:
                    spoken.set()

        readers = [threading.Thread(target=read, args=[i]) for i in range(2)]
        for reader in readers:
            reader.start()
        self.assertTrue(spoken.wait(TIMEOUT), errors)
        for process in processes:
            process.stdin.write("\n")
            process.stdin.flush()
        for process, reader in zip(processes, readers):
            self.assertEqual(process.stdout.read(), "free\n", errors)
            self.assertEqual(process.wait(TIMEOUT), 0)
            reader.join()
        found = re.findall(r"deadlock in communicator \w+: (.*?);", "".join(errors))
        self.assertEqual(len(found), 1, errors)
        self.assertIn("rank 0 waits in send(1 x float32, to rank 1) for rank 1", found[0])
        self.assertIn("rank 1 waits in send(1 x float32, to rank 0) for rank 0", found[0])

    def test_killed_rank(self):
        """A rank that died in a collective never arrives; aborting frees the one that waits for it."""
        survivor, victim = self.start_ranks("""
            x = torch.empty(1024, device="cuda")
            dist.all_reduce(x)
            torch.cuda.synchronize()
            if rank == 1:
                dist.all_reduce(x)
                print("inside", flush=True)
                torch.cuda.synchronize()  # killed here
            input()  # until the other one is dead
            dist.all_reduce(x)
            work = dist.all_reduce(x, async_op=True)
            waiting = threading.Thread(target=torch.cuda.synchronize)
            waiting.start()
            assert not work.is_completed() and waiting.is_alive()
            dist.distributed_c10d._abort_process_group()
            waiting.join()
            print("free")
            """)  # fmt: skip
        self.assertEqual(victim.stdout.readline(), "inside\n")
        victim.kill()
        victim.wait()
        output, errors = survivor.communicate("\n", timeout=TIMEOUT)
        self.assertEqual((survivor.returncode, output), (0, "free\n"), errors)


if __name__ == "__main__":
    unittest.main()

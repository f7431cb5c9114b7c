"""Clocks: device time from CUDA graph replays over a cold L2, wall time, host time; and
the copy bandwidth.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

MEMORY_FOR_SETS = 16e9  # bytes


class Stopwatch:
    """Times lists of calls on one device. On the CPU (dry run) there are no graphs and
    few repeats.
    """

    def __init__(self, device: str):
        self.device, self.cuda = device, device == "cuda"
        self.compiler = "inductor" if self.cuda else "aot_eager"
        self.copied = (64, 256, 1024) if self.cuda else (1,)  # MiB
        self.samples = 15 if self.cuda else 2
        self.l2 = 1 << 16
        if self.cuda:
            properties = torch.cuda.get_device_properties(torch.cuda.current_device())
            self.l2 = getattr(properties, "L2_cache_size", 0) or 1 << 26

    def sync(self):
        if self.cuda:
            torch.cuda.synchronize()

    def sets(self, touched: int, held: int) -> int:
        """How many argument sets to rotate, if a call touches and a set holds so many
        bytes: at least four L2s' worth are touched before a set comes round again, as
        far as memory (and for tiny shapes, patience) allows."""
        if not self.cuda:
            return 2
        return max(
            2, min(64, max(4, -(-4 * self.l2 // touched)), int(MEMORY_FOR_SETS // held))
        )

    def device_us(self, calls: list[Callable]) -> dict:
        """Microseconds per call from graph replays of all the calls: median, 20th and
        80th percentile.
        """
        for _ in range(2):
            for call in calls:
                call()
        self.sync()
        graph = torch.cuda.CUDAGraph()
        # The current stream, which the caller has made a side stream: autograd runs a
        # backward on its forward's.
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            # kept, so that no call writes to the memory of another
            outputs = [call() for call in calls]
        start, end = (
            torch.cuda.Event(enable_timing=True),
            torch.cuda.Event(enable_timing=True),
        )

        def replays(n: int) -> float:
            start.record()
            for _ in range(n):
                graph.replay()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) * 1e3 / n / len(calls)

        replays(3)
        n = max(1, min(50, int(3e3 / (replays(1) * len(calls)))))  # about 3 ms a sample
        samples = sorted(replays(n) for _ in range(self.samples))
        del outputs
        return {
            "us": statistics.median(samples),
            "us_p20": samples[len(samples) // 5],
            "us_p80": samples[-1 - len(samples) // 5],
        }

    def wall_us(self, calls: list[Callable]) -> float:
        """Median microseconds per call of plain loops, host cost included."""
        for call in calls[:4]:
            call()
        self.sync()
        start = time.perf_counter()
        calls[0]()
        self.sync()
        once = time.perf_counter() - start
        loops = max(1, min(100, int(0.015 / once / len(calls)))) if self.cuda else 1
        samples = []
        for _ in range(5 if self.cuda else 1):
            self.sync()
            start = time.perf_counter()
            for _ in range(loops):
                for call in calls:
                    call()
            self.sync()
            samples.append((time.perf_counter() - start) * 1e6 / loops / len(calls))
        return statistics.median(samples)


def copy_bandwidth(watch: Stopwatch) -> dict:
    """GB/s, bytes read plus bytes written, of `Tensor.copy_` at a few sizes, and the
    best of them.
    """
    result = {
        f"{megabytes}MiB": copy_rate(watch, megabytes << 20)
        for megabytes in watch.copied
    }
    return result | {"best": max(result.values())}


def copy_rate(watch: Stopwatch, size: int) -> float:
    """GB/s, read plus written, of copies of `size` bytes each."""
    pairs = []
    for _ in range(watch.sets(2 * size, 2 * size)):
        source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=watch.device)
        pairs.append((source, torch.empty_like(source)))
    calls = [lambda a=source, b=target: b.copy_(a) for source, target in pairs]
    us = watch.device_us(calls)["us"] if watch.cuda else watch.wall_us(calls)
    return 2 * size / us / 1e3

"""A clock: device time from CUDA graph replays over a cold L2; and the copy bandwidth."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch

MEMORY_FOR_SETS = 16e9  # bytes
COPIED = (64, 256, 1024)  # MiB
SAMPLES = 15


class Stopwatch:
    """Times lists of calls on a GPU; on the CPU (dry run) there is nothing to time."""

    def __init__(self, device: str):
        self.device, self.cuda = device, device == "cuda"
        self.compiler = "inductor" if self.cuda else "aot_eager"
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
        wanted = max(4, -(-4 * self.l2 // touched))
        return max(2, min(64, wanted, int(MEMORY_FOR_SETS // held)))

    def device_us(self, calls: list[Callable]) -> dict:
        """Microseconds per call from graph replays of all the calls, the median of some
        samples.
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
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def replays(n: int) -> float:
            start.record()
            for _ in range(n):
                graph.replay()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) * 1e3 / n / len(calls)

        replays(3)
        n = max(1, min(50, int(3e3 / (replays(1) * len(calls)))))  # about 3 ms a sample
        samples = [replays(n) for _ in range(SAMPLES)]
        del outputs
        return {"us": statistics.median(samples)}


def copy_bandwidth(watch: Stopwatch) -> dict[str, float]:
    """GB/s, bytes read plus bytes written, of `Tensor.copy_` at a few sizes, and the
    best of them; nothing on a CPU.
    """
    if not watch.cuda:
        return {}
    result = {}
    for mebibytes in COPIED:
        size, calls = mebibytes << 20, []
        for _ in range(watch.sets(2 * size, 2 * size)):
            source = torch.randint(255, (size,), dtype=torch.uint8, device=watch.device)
            calls.append(partial(torch.empty_like(source).copy_, source))
        result[f"{mebibytes}MiB"] = 2 * size / watch.device_us(calls)["us"] / 1e3
    return result | {"best": max(result.values())}

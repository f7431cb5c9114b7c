"""Kernel and host timings of one norm at a time: the measuring half of gpu_check.py, which explains the sections.

Every implementation of a case gets the same numbers and is first compared with float64 under the tests' tolerance
policy. Device times are CUDA graph replays of one pass over several argument sets, together larger than four times
the L2 cache, so that no call finds its input there.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.exit(f"{__doc__.strip()}\n\nThis is no program by itself: run scripts/gpu_check.py (see its --help)")

import copy
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata

import torch
import torch._functorch.config
import torch.nn.functional as F
from tolerance import assert_as_accurate
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import hf_rmsnorm
from hf_rmsnorm.reference import reference_norm

EPS = 1e-6
OURS = "hf_rmsnorm"
DIRECTIONS = {"forward": 2, "backward": 3, "forward+backward": 5}  # passes over x-sized tensors that it takes at least
MEMORY_FOR_SETS = 16e9  # bytes
torch._functorch.config.donated_buffer = False  # the backward is timed with retain_graph=True


@dataclass(frozen=True)
class Case:
    """One shape to time. `layout`: "contiguous", or "qk" for a slice of a packed projection whose gradient arrives
    transposed, as attention sends it. `compiled`: also time torch.compile, which takes seconds to compile."""

    kind: str
    shape: tuple[int, ...]
    layout: str = "contiguous"
    compiled: bool = False

    def __str__(self) -> str:
        return f"{self.kind} {'x'.join(map(str, self.shape))} {self.layout}"


CASES = (  # the most telling first: what is left when time runs out is skipped
    Case("RMSNorm", (8192, 4096), compiled=True),
    Case("RMSNorm", (2, 4096, 32, 128), "qk", compiled=True),
    Case("LayerNorm", (8192, 1024), compiled=True),
    Case("RMSNorm", (2048, 4096)),
    Case("RMSNorm", (1, 4096), compiled=True),
    Case("RMSNorm", (16384, 5120)),
    Case("RMSNorm", (2, 4096, 8, 128), "qk"),
    Case("RMSNorm", (1, 8192, 32, 128)),
    Case("LayerNorm", (8192, 4096)),
    Case("RMSNorm", (4096, 8192)),
    Case("RMSNorm", (8192, 896)),
    Case("RMSNorm", (256, 4096)),
    Case("RMSNorm", (2048, 14336)),
    Case("RMSNorm", (1024, 32768)),
    Case("LayerNorm", (4096, 8192)),
    Case("RMSNorm", (1, 1, 32, 128)),
    Case("LayerNorm", (2048, 16384)),
)
DRY_CASES = (
    Case("RMSNorm", (6, 64), compiled=True),
    Case("RMSNorm", (2, 3, 4, 32), "qk"),
    Case("LayerNorm", (6, 64), compiled=True),
)


@dataclass
class Implementation:
    """Something that computes a case: `call(x)` gives y, `parameters` are what it has gradients for."""

    call: Callable[[torch.Tensor], torch.Tensor]
    parameters: list[torch.Tensor]


def peers() -> tuple[dict, dict[str, str]]:
    """The other libraries' functions that can be imported here, and for each its version or why it is missing."""
    functions, found = {}, {}

    def liger():
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        # in_place=False: the default writes dx over dy, which other readers of dy would notice
        return {
            "RMSNorm": lambda x, m: LigerRMSNormFunction.apply(x, m.weight, EPS, 0.0, "llama", False, None),
            "LayerNorm": lambda x, m: LigerLayerNormFunction.apply(x, m.weight, m.bias, EPS),
        }

    def quack():
        from quack import rmsnorm

        return {"RMSNorm": lambda x, m: rmsnorm(x, m.weight, eps=EPS)}

    for name, load, package in (("liger", liger, "liger-kernel"), ("quack", quack, "quack-kernels")):
        try:
            functions[name], found[name] = load(), metadata.version(package)
        except Exception as error:  # a peer may fail to import in any way it likes; which way is in the result
            found[name] = f"not importable: {type(error).__name__}: {error}"[:200]
    return functions, found


def make_norm(kind: str, hidden_size: int, device: str, dtype: torch.dtype) -> nn.Module:
    """The module Hugging Face models use, with random parameters."""
    norm = LlamaRMSNorm(hidden_size, eps=EPS) if kind == "RMSNorm" else nn.LayerNorm(hidden_size, eps=EPS)
    norm = norm.to(device, dtype)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
        if kind == "LayerNorm":
            norm.bias.uniform_(-0.5, 0.5)
    return norm


def patched_copy(norm: nn.Module) -> nn.Module:
    holder = nn.Sequential(copy.deepcopy(norm))
    report = hf_rmsnorm.patch_model(holder)
    if not report.swapped:
        raise RuntimeError(f"patch_model did not swap {type(norm).__name__}: {report}")
    return holder[0]


def implementations(kind: str, norm: nn.Module, peer_functions: dict, compile_backend: str | None) -> dict:
    """Name -> Implementation; `hf_eager` is first, because the others are judged by it."""
    patched = patched_copy(norm)
    made = {
        "hf_eager": Implementation(norm, list(norm.parameters())),
        OURS: Implementation(patched, list(patched.parameters())),
    }
    if kind == "RMSNorm":  # nn.LayerNorm is F.layer_norm already
        shape, weight = norm.weight.shape, norm.weight
        made["F.rms_norm"] = Implementation(lambda x: F.rms_norm(x, shape, weight, EPS), [weight])
    if compile_backend is not None:
        compiled = copy.deepcopy(norm)
        call = torch.compile(compiled, dynamic=False, fullgraph=True, backend=compile_backend)
        made["torch.compile"] = Implementation(call, list(compiled.parameters()))
    for name, functions in peer_functions.items():
        if kind in functions:
            made[name] = Implementation(lambda x, f=functions[kind]: f(x, norm), list(norm.parameters()))
    return made


def make_set(case: Case, device: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(x, dy) of one call; x is a leaf that asks for its gradient."""
    if case.layout == "qk":
        batch, length, heads, size = case.shape
        packed = torch.randn(batch, length, (heads + 8) * size, device=device, dtype=dtype)
        x = packed[..., : heads * size].unflatten(-1, (heads, size))
        dy = torch.randn(batch, heads, length, size, device=device, dtype=dtype).transpose(1, 2)
    else:
        x = torch.randn(case.shape, device=device, dtype=dtype)
        dy = torch.randn(case.shape, device=device, dtype=dtype)
    return x.detach().requires_grad_(), dy


class Stopwatch:
    """Times lists of calls on one device. On the CPU (dry run) there are no graphs and few repeats."""

    def __init__(self, device: str):
        self.cuda = device == "cuda"
        self.samples = 15 if self.cuda else 2
        self.l2 = 1 << 16
        if self.cuda:
            self.l2 = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 0) or 1 << 26

    def sync(self):
        if self.cuda:
            torch.cuda.synchronize()

    def sets(self, touched: int, held: int) -> int:
        """How many argument sets to rotate, if a call touches and a set holds so many bytes: at least four L2s' worth
        are touched before a set comes round again, as far as memory (and for tiny shapes, patience) allows."""
        if not self.cuda:
            return 2
        return max(2, min(64, max(4, -(-4 * self.l2 // touched)), int(MEMORY_FOR_SETS // held)))

    def device_us(self, calls: list[Callable]) -> dict:
        """Microseconds per call from graph replays of all the calls: median, 20th and 80th percentile."""
        for _ in range(2):
            for call in calls:
                call()
        self.sync()
        graph = torch.cuda.CUDAGraph()
        # The current stream, which the caller has made a side stream: autograd runs a backward on its forward's.
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            outputs = [call() for call in calls]  # kept, so that each call writes to memory of its own
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

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

    def host_us(self, call: Callable) -> float:
        """Median microseconds that one call keeps the host busy; the device runs behind, nobody waits for it."""
        calls = 50 if self.cuda else 3  # few enough that the launch queue never fills up
        samples = []
        for _ in range(9 if self.cuda else 2):
            self.sync()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            samples.append((time.perf_counter() - start) * 1e6 / calls)
        return statistics.median(samples[1:])


def judge(made: dict, norm: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> dict:
    """Compare every implementation's y and gradients with float64; returns name -> {"failures", "errors", ...}."""
    leaves = [x.detach().double().requires_grad_(), *(p.detach().double().requires_grad_() for p in norm.parameters())]
    holder = nn.Sequential(copy.deepcopy(norm))
    spec = hf_rmsnorm.patch_model(holder).swapped[0].formula
    y = reference_norm(leaves[0], leaves[1], leaves[2] if len(leaves) > 2 else None, spec)
    names = ("y", "dx", "dweight", "dbias")
    exact = dict(zip(names, (y.detach(), *torch.autograd.grad(y, leaves, dy.double())), strict=False))
    eager, verdicts = {}, {}
    for name, implementation in made.items():
        poison = [torch.full_like(exact["y"], torch.nan, dtype=x.dtype) for _ in range(3)]
        del poison  # what the implementation leaves unwritten in the memory it gets next is NaN
        verdict = verdicts[name] = {"failures": [], "errors": {}}
        try:
            y = implementation.call(x)
            gradients = torch.autograd.grad(y, [x, *implementation.parameters], dy.clone())
        except Exception as error:
            verdict["failures"].append(f"{type(error).__name__}: {error}"[:300])
            verdict["raised"] = True
            continue
        got = dict(zip(names, (y.detach(), *gradients), strict=False))
        eager = eager or got
        for what, value in got.items():
            errors = {k: (v[what].double() - exact[what]).abs().max().item() for k, v in (("own", got), ("hf", eager))}
            verdict["errors"][what] = errors
            try:
                assert_as_accurate(value, eager[what], exact[what], what)
            except AssertionError as error:
                verdict["failures"].append(str(error))
        verdict["bit_equal_to_hf"] = (got["y"] == eager["y"]).double().mean().item()
    return verdicts


def calls_of(implementation: Implementation, sets: list) -> dict[str, list[Callable]]:
    """For each direction one call per argument set."""

    def forward(x):
        def call():
            with torch.no_grad():
                return implementation.call(x)

        return call

    def backward(x, dy):
        y, leaves = implementation.call(x), [x, *implementation.parameters]
        return lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True)

    def both(x, dy):
        leaves = [x, *implementation.parameters]
        return lambda: torch.autograd.grad(implementation.call(x), leaves, dy)

    return {
        "forward": [forward(x) for x, _ in sets],
        "backward": [backward(x, dy) for x, dy in sets],
        "forward+backward": [both(x, dy) for x, dy in sets],
    }


def copy_bandwidth(watch: Stopwatch, device: str) -> dict:
    """GB/s, bytes read plus bytes written, of `Tensor.copy_` at a few sizes, and the best of them."""
    result = {}
    for megabytes in (64, 256, 1024) if watch.cuda else (1,):
        size = megabytes << 20
        pairs = []
        for _ in range(watch.sets(2 * size, 2 * size)):
            source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
            pairs.append((source, torch.empty_like(source)))
        calls = [lambda a=source, b=target: b.copy_(a) for source, target in pairs]
        us = watch.device_us(calls)["us"] if watch.cuda else watch.wall_us(calls)
        result[f"{megabytes}MiB"] = 2 * size / us / 1e3
    result["best"] = max(result.values())
    return result


def time_case(case: Case, watch: Stopwatch, device: str, dtype, peer_functions: dict, best_copy: float) -> dict:
    """Judge and time every implementation of one case."""
    torch._dynamo.reset()  # the compiled code of the case before would count towards the limit of recompiles
    norm = make_norm(case.kind, case.shape[-1], device, dtype)
    backend = None if not case.compiled else "inductor" if watch.cuda else "aot_eager"
    made = implementations(case.kind, norm, peer_functions, backend)
    size = torch.Size(case.shape).numel() * dtype.itemsize
    count = watch.sets(2 * size, 12 * size)  # a set holds x, dy, results and what eager saves for its backward
    sets = [make_set(case, device, dtype) for _ in range(count)]
    verdicts = judge(made, norm, *sets[0])
    result = {
        "case": str(case),
        "dtype": str(dtype).removeprefix("torch."),
        "sets": count,
        "cold": count * 2 * size >= 4 * watch.l2,
        "implementations": {},
    }
    for name, implementation in made.items():
        entry = result["implementations"][name] = {"gate": verdicts[name]}
        if verdicts[name].pop("raised", False):
            continue
        try:
            for direction, calls in calls_of(implementation, sets).items():
                timing = {"wall_us": watch.wall_us(calls)}
                if watch.cuda:
                    timing |= watch.device_us(calls)
                    timing["gb_per_s"] = DIRECTIONS[direction] * size / timing["us"] / 1e3
                    timing["of_copy"] = timing["gb_per_s"] / best_copy
                entry[direction] = timing
        except Exception as error:
            entry["error"] = f"{type(error).__name__}: {error}"[:300]
            watch.sync()
    gc.collect()
    if watch.cuda:
        torch.cuda.empty_cache()
    return result


def run_kernels(section) -> None:
    """The section "kernels": see gpu_check.py."""
    watch, device, dtype = Stopwatch(section.device), section.device, torch.bfloat16
    peer_functions, section.data["peers"] = peers()
    section.data["copy_gb_per_s"] = bandwidth = copy_bandwidth(watch, device)
    section.save()
    section.data["cases"], section.data["skipped"] = [], []
    cases = DRY_CASES if section.dry_run else CASES
    last = 0.0  # seconds
    for case in cases:
        if section.left() < 1.5 * last:
            section.data["skipped"].append(str(case))
            continue
        start = time.perf_counter()
        result = time_case(case, watch, device, dtype, peer_functions, bandwidth["best"])
        last = time.perf_counter() - start
        section.data["cases"].append(result)
        ours = result["implementations"][OURS]
        section.failures += [f"{case}: {failure}" for failure in ours["gate"]["failures"]]
        if "error" in ours:
            section.failures.append(f"{case}: {ours['error']}")
        section.save()


def run_host(section) -> None:
    """The section "host": see gpu_check.py."""
    watch, device, dtype = Stopwatch(section.device), section.device, torch.bfloat16
    hidden_size = 64 if section.dry_run else 4096
    peer_functions, section.data["peers"] = peers()
    norm = make_norm("RMSNorm", hidden_size, device, dtype)
    made = implementations("RMSNorm", norm, peer_functions, "inductor" if watch.cuda else "aot_eager")
    weight = norm.weight
    made[f"{OURS}.rms_norm"] = Implementation(lambda x: hf_rmsnorm.rms_norm(x, weight, EPS), [weight])
    section.data["shape"], section.data["us_per_call"] = [1, 1, hidden_size], {}
    x, dy = make_set(Case("RMSNorm", (1, 1, hidden_size)), device, dtype)
    for name, implementation in made.items():
        if section.left() < 5:
            section.data.setdefault("skipped", []).append(name)
            continue
        entry = section.data["us_per_call"][name] = {}
        try:
            directions = calls_of(implementation, [(x, dy)])
            entry["inference"] = watch.host_us(directions["forward"][0])
            entry["forward"] = watch.host_us(lambda call=implementation.call: call(x))
            entry["forward+backward"] = watch.host_us(directions["forward+backward"][0])
        except Exception as error:
            entry["error"] = f"{type(error).__name__}: {error}"[:300]
            if name.startswith(OURS):
                section.failures.append(f"{name}: {entry['error']}")
        section.save()

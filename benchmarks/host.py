"""What one call costs the host: on a GPU with its launches, on a CPU with the launch
itself stubbed.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Hashable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from unittest import mock

import torch

from benchmarks.counting import Operators, build, no_launch_kept
from benchmarks.driver import StubDriver
from benchmarks.peers import (
    COMPILED,
    EAGER,
    OURS,
    Case,
    calls_of,
    implementations,
    make_norms,
    make_set,
    other_libraries,
)
from benchmarks.shapes import ModelShape
from benchmarks.timing import Stopwatch
from hf_rmsnorm import patch_model
from hf_rmsnorm.fused import layer, norm
from hf_rmsnorm.ops import backend, first_use

MODES = ("inference", "forward", "forward+backward")
STUBBED = (
    "no GPU: kernels are compiled for sm_90 and not launched, so the launch itself (2 to 3 us) and the check of the "
    "current device are left out of the Triton rows; the rows of torch include the arithmetic of 64 elements, and "
    "F.rms_norm is several operators on a CPU and one on a GPU"
)
LOOPS = 50  # few enough that a launch queue never fills up
ROUNDS = 60  # of so many loops
HIDDEN_SIZE = 64  # small, so that the arithmetic of a CPU weighs little
PATCHED = "patched"
DECODERS = {
    "LLaMA": ModelShape("llama", 64, 96, 4, 2, 16, 128),
    "Qwen3": ModelShape("qwen3", 64, 96, 4, 2, 16, 128, qk_norm=True),
}
KINDS = {"unpatched": None, "norms alone": {"fuse_residual": False}, PATCHED: {}}
CASES = (
    Case("RMSNorm", (1, 1, HIDDEN_SIZE)),
    Case("add + RMSNorm", (1, 1, HIDDEN_SIZE)),
    Case("q/k norm", (1, 1, 4, 2, HIDDEN_SIZE)),
)


def untimed() -> str | None:
    """The reason why this process cannot measure host costs without a GPU, or None."""
    try:
        from hf_rmsnorm.kernels import compiled
    except ImportError as error:
        return f"host costs need triton: {error}"
    if compiled.INTERPRETED:
        return "host costs: TRITON_INTERPRET=1 replaces the launch path, unset it"
    return None


@contextmanager
def launches_left_out() -> Iterator[None]:
    """Send calls on CPU tensors through the whole launch path, with kernels compiled
    for sm_90, up to the launch.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from hf_rmsnorm.kernels import compiled

    others = {
        (backend, "_device_refusal"): lambda *_: None,
        (norm, "left_alone"): lambda _: False,  # which is asked of CPU tensors
        (layer, "left_alone"): lambda _: False,
        (compiled, "device_limits"): lambda *_: (132, 232_448),
        (first_use, "is_enabled"): False,  # there are no results
    }
    with ExitStack() as stack:
        # Liger does not say
        stack.enter_context(mock.patch.dict(os.environ, TRITON_DEFAULT_FP_FUSION="1"))
        for (module, name), other in others.items():
            stack.enter_context(mock.patch.object(module, name, other))
        stack.enter_context(no_launch_kept())
        # asking for the property `active` of a newer Triton would look for a GPU
        active = "_active" if hasattr(driver, "_active") else "active"
        stack.callback(setattr, driver, active, getattr(driver, active))
        driver.set_active(StubDriver(GPUTarget("cuda", 90, 32), 232_448))
        yield


def host_us(
    calls: dict, rounds: int, device: str = "cpu", loops: int = LOOPS
) -> dict[Hashable, dict]:
    """Microseconds that a call keeps the host busy, as `median_and_least`."""
    return median_and_least(timed_in_turns(calls, rounds, device, loops))


def median_and_least(samples: dict[Hashable, list[float]]) -> dict[Hashable, dict]:
    """By name ``us``, the median, and ``us_min``, the least, which other processes
    disturb least.
    """
    figures = {}
    for name, taken in samples.items():
        figures[name] = {"us": statistics.median(taken), "us_min": min(taken)}
    return figures


def timed_in_turns(
    calls: dict, rounds: int, device: str, loops: int
) -> dict[Hashable, list[float]]:
    """By name, the microseconds that a call kept the host busy in each round.

    The calls alternate, so that a busy machine slows all of them, in another order each
    time: what runs before a call takes its place in the processor's caches.
    """
    watch = Stopwatch(device)
    clock = time.perf_counter
    if not watch.cuda:
        # all in this thread, so that what other processes take is left out
        clock = time.thread_time
        torch.set_num_threads(1)
    samples = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(20):  # compiles the kernels, fills caches
            call()
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(calls), len(calls)):
            call = calls[name]
            call()
            watch.sync()  # then the device runs behind, and the host does not wait
            start = clock()
            for _ in range(loops):
                call()
            samples[name].append((clock() - start) * 1e6 / loops)
    return samples


def run(device: str, dtype: torch.dtype, rounds: int | None = None) -> dict:
    """Host costs of each implementation of a norm, add + norm and q/k norm.

    Returns:
        ``cases``: by case, implementation and mode the figures of `host_us`, with
            ``operators``, how many are dispatched in inference;
        ``decoder_layer``: by architecture and kind of patch, as `decoder_layer`.
    """
    libraries, found = other_libraries()
    rounds = rounds or ROUNDS
    data = {"peers": found, "not_measured": [], "cases": {}}
    launches = nullcontext()
    if device == "cpu":
        reason = untimed()
        if reason is not None:
            return data | {"not_measured": [reason]}
        launches = launches_left_out()
        data["not_measured"] = [STUBBED]
    with launches:
        for case in CASES:
            compiler = "inductor" if device != "cpu" and case is CASES[0] else None
            norms = make_norms(case, device, dtype)
            made = implementations(case, norms, (), libraries, compiler)
            data["cases"][str(case)] = _time(case, made, device, dtype, rounds)
        data["decoder_layer"] = {
            name: decoder_layer(shape, KINDS, device, rounds)
            for name, shape in DECODERS.items()
        }
    return data


def _time(case: Case, made: dict, device: str, dtype: torch.dtype, rounds: int) -> dict:
    entries = {name: {} for name in made}
    calls = {mode: {} for mode in MODES}
    for name, implementation in made.items():
        try:
            inputs, gradients = make_set(case, device, dtype)
            one = partial(implementation.call, *inputs)
            both = calls_of(implementation, [(inputs, gradients)])["forward+backward"]
            if name != COMPILED:
                # Dynamo compiles nothing while a mode watches the operators
                with torch.no_grad(), Operators() as operators:
                    one()
                entries[name]["operators"] = operators.computing
            both[0]()
        except Exception as error:
            # a peer may fail in any way it likes; which way is in the result
            entries[name]["error"] = f"{type(error).__name__}: {error}"[:300]
            continue
        # the forward keeps what its backward needs
        for mode, call in zip(MODES, (one, one, *both), strict=True):
            calls[mode][name] = call
    for mode, of_mode in calls.items():
        with torch.set_grad_enabled(mode != "inference"):
            for name, figures in host_us(of_mode, rounds, device).items():
                entries[name][mode] = figures
    return entries


def decoder_layer(
    shape: ModelShape, kinds: dict, device: str, rounds: int
) -> dict[str, dict]:
    """Microseconds that one decoder layer keeps the host busy for one token.

    The difference between a model of six layers and one of two in the same round,
    divided by four. The models are small: the host does the same work for a large one.

    Args:
        kinds: by name, options of `patch_model`, or None for an unpatched model.

    Returns:
        By kind, ``us``: the median over the rounds, and ``us_p25`` and ``us_p75``.
    """
    calls = {}
    for kind, options in kinds.items():
        for layers in (2, 6):
            model = build(shape, layers, device).eval()
            if options is not None:
                patch_model(model, **options)
            calls[kind, layers] = _token(model)
    with torch.no_grad():
        samples = timed_in_turns(calls, rounds, device, loops=5)
    found = {}
    for kind in kinds:
        pairs = zip(samples[kind, 6], samples[kind, 2], strict=True)
        of_a_layer = [(six - two) / 4 for six, two in pairs]
        low, median, high = statistics.quantiles(of_a_layer, n=4)
        found[kind] = {"us": median, "us_p25": low, "us_p75": high}
    return found


def _token(model: torch.nn.Module) -> partial:
    ids = torch.ones(1, 1, dtype=torch.long, device=model.device)
    return partial(model, ids, use_cache=False)


def version_ratios(rounds: int = 40) -> dict:
    """What a Triton's launches cost the host, the launches themselves left out: of a
    norm in inference, and of a LLaMA layer for one token.

    Returns:
        ``norm`` and ``layer``, each with ``unpatched`` and ``patched`` in microseconds,
        and their ``ratio``.
    """
    case, dtype = CASES[0], torch.bfloat16
    norms = make_norms(case, "cpu", dtype)
    both = implementations(case, norms, (), {}, None)
    inputs, _ = make_set(case, "cpu", dtype)
    with launches_left_out(), torch.no_grad():
        calls = {name: partial(both[name].call, *inputs) for name in (EAGER, OURS)}
        norm = host_us(calls, rounds)
        kinds = {"unpatched": None, PATCHED: {}}
        layer = decoder_layer(DECODERS["LLaMA"], kinds, "cpu", rounds)
    return {
        "norm": _pair(norm[EAGER]["us_min"], norm[OURS]["us_min"]),
        "layer": _pair(layer["unpatched"]["us"], layer[PATCHED]["us"]),
    }


def _pair(unpatched: float, patched: float) -> dict[str, float]:
    ratio = patched / unpatched
    return {"unpatched": unpatched, "patched": patched, "ratio": ratio}

"""One norm in every implementation: each is checked against float64, then timed."""

from __future__ import annotations

import gc

import torch
import torch._functorch.config

from benchmarks.counting import saved_bytes
from benchmarks.peers import (
    OURS,
    Case,
    Implementation,
    calls_of,
    implementations,
    judge,
    make_norms,
    make_set,
    tables_of,
)
from benchmarks.timing import Stopwatch

DIRECTIONS = ("forward", "backward", "forward+backward")


def time_case(
    case: Case,
    watch: Stopwatch,
    dtype: torch.dtype,
    libraries: dict,
    best_copy: float | None,
) -> dict:
    """Check every implementation of one case, count the bytes that it saves for its
    backward, and time it.

    Args:
        best_copy: GB/s, measured in the same run on a GPU.

    Returns:
        ``implementations``: by name ``gate``, ``saved_bytes_per_row``, and for each
            direction its figures: ``of_copy`` is its share of the best copy's
            bandwidth.
    """
    # the compiled code of the case before would count towards the limit of recompiles
    torch._dynamo.reset()
    # the backward is timed with retain_graph=True
    torch._functorch.config.donated_buffer = False
    norms = make_norms(case, watch.device, dtype)
    tables = tables_of(case, watch.device, dtype)
    compiler = watch.compiler if case.compiled else None
    made = implementations(case, norms, tables, libraries, compiler)
    size = case.elements * dtype.itemsize
    touched = case.passes("forward") * size
    # with results and what eager saves
    count = watch.sets(touched, 6 * touched)
    sets = [make_set(case, watch.device, dtype) for _ in range(count)]
    verdicts = judge(case, made, norms, *sets[0])
    entries = {}
    for name, implementation in made.items():
        entries[name] = {"gate": verdicts[name]}
        if verdicts[name].get("raised"):
            continue
        try:
            entries[name] |= _measured(implementation, case, watch, sets)
            for way in DIRECTIONS if watch.cuda else ():
                timing = entries[name][way]
                gb_per_s = case.passes(way) * size / timing["us"] / 1e3
                timing["of_copy"] = gb_per_s / best_copy
        except Exception as error:  # as in `judge`
            entries[name]["error"] = f"{type(error).__name__}: {error}"[:300]
            watch.sync()
    _compare(entries)
    gc.collect()
    if watch.cuda:
        torch.cuda.empty_cache()
    return {
        "case": str(case),
        "kind": case.kind,
        "dtype": str(dtype).removeprefix("torch."),
        "cold": count * touched >= 4 * watch.l2,
        "implementations": entries,
    }


def _measured(
    implementation: Implementation, case: Case, watch: Stopwatch, sets: list
) -> dict:
    """``saved_bytes_per_row``, and the time of each direction."""
    inputs, _ = sets[0]
    kept = saved_bytes(lambda: implementation.call(*inputs), implementation.parameters)
    entry = {"saved_bytes_per_row": kept / case.rows}
    for way, calls in calls_of(implementation, sets).items():
        if watch.cuda:
            entry[way] = watch.device_us(calls)
        else:
            calls[0]()
    return entry


def _compare(entries: dict) -> None:
    """Add ``times_ours``, which is above 1 where ours is faster."""
    for direction in DIRECTIONS:
        mine = entries[OURS].get(direction, {}).get("us")
        for entry in entries.values():
            timing = entry.get(direction)
            if timing and mine:
                timing["times_ours"] = timing["us"] / mine

"""Norms in the shapes of real models: each implementation is checked against float64,
then timed.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
import torch._functorch.config

from benchmarks.counting import saved_bytes
from benchmarks.peers import (
    AGAIN,
    EAGER,
    OURS,
    Case,
    calls_of,
    implementations,
    judge,
    make_norms,
    make_set,
    other_libraries,
)
from benchmarks.shapes import AGAINST_LAYER_NORM, ModelShape
from benchmarks.timing import Stopwatch, copy_bandwidth, copy_rate

DIRECTIONS = ("forward", "backward", "forward+backward")
UNTIMED = (
    "times, bandwidth and torch.compile need a GPU, a CPU runs these kernels in Triton's interpreter; what F.rms_norm "
    "saves is that of a CPU, where it is several operators"
)


def cases(shapes: dict[str, ModelShape], tokens: Iterable[int]) -> list[Case]:
    """The norms of the models at each number of tokens; what several models share is
    there once, with their names.
    """
    found: dict[Case, list[str]] = {}
    for count in tokens:
        for name, shape in shapes.items():
            offset = shape.weight_offset
            of_model = [
                Case(kind, (count, shape.hidden_size), offset)
                for kind in ("RMSNorm", "add + RMSNorm")
            ]
            if shape.qk_norm:
                sizes = 1, count, shape.heads, shape.key_heads, shape.head_dim
                of_model += [
                    Case(kind, sizes, offset)
                    for kind in ("q/k norm", "q/k norm + rotary")
                ]
            for case in of_model:
                found.setdefault(case, []).append(name)
    return [
        Case(c.kind, c.shape, c.weight_offset, True, tuple(names))
        for c, names in found.items()
    ]


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
        best_copy: GB/s, measured in the same run. None: nothing is timed.

    Returns:
        ``implementations``: by name ``gate``, ``saved_bytes_per_row``, and for each
            direction its figures: ``of_copy``
        is its share of the best copy's bandwidth, ``of_own_copy`` of that of a copy of
        as many bytes.
    """
    # the compiled code of the case before would count towards the limit of recompiles
    torch._dynamo.reset()
    # the backward is timed with retain_graph=True
    torch._functorch.config.donated_buffer = False
    norms = make_norms(case, watch.device, dtype)
    made = implementations(
        case, norms, libraries, watch.compiler if case.compiled else None
    )
    size = case.elements * dtype.itemsize
    touched = case.passes("forward") * size
    # with results and what eager saves
    count = 1 if best_copy is None else watch.sets(touched, 6 * touched)
    sets = [make_set(case, watch.device, dtype) for _ in range(count)]
    verdicts = judge(case, made, norms, *sets[0])
    own_copy = {}
    if best_copy is not None and watch.cuda:
        # a copy of the fewest bytes a direction moves: small copies reach less
        for direction in DIRECTIONS:
            own_copy[direction] = copy_rate(watch, case.passes(direction) * size // 2)
    result = {
        "case": str(case),
        "kind": case.kind,
        "shape": list(case.shape),
        "models": list(case.models),
        "dtype": str(dtype).removeprefix("torch."),
        "sets": count,
        "cold": None if best_copy is None else count * touched >= 4 * watch.l2,
        "implementations": {},
    }
    for name, implementation in made.items():
        entry = result["implementations"][name] = {"gate": verdicts[name]}
        if verdicts[name].get("raised"):
            continue
        try:
            kept = saved_bytes(
                lambda call=implementation.call: call(*sets[0][0]),
                implementation.parameters,
            )
            entry["saved_bytes_per_row"] = kept / case.rows
            if best_copy is None:
                continue
            for direction, calls in calls_of(implementation, sets).items():
                timing = {"wall_us": watch.wall_us(calls)}
                if watch.cuda:
                    timing |= watch.device_us(calls)
                    timing["gb_per_s"] = (
                        case.passes(direction) * size / timing["us"] / 1e3
                    )
                    timing["of_copy"] = timing["gb_per_s"] / best_copy
                    timing["of_own_copy"] = timing["gb_per_s"] / own_copy[direction]
                entry[direction] = timing
        except Exception as error:  # as in `judge`
            entry["error"] = f"{type(error).__name__}: {error}"[:300]
            watch.sync()
    _compare(result["implementations"])
    gc.collect()
    if watch.cuda:
        torch.cuda.empty_cache()
    return result


def same_numerics(entry: dict) -> bool:
    """Whether an implementation passes the gate and rounds as Hugging Face does (tiles
    may change a sum's order).
    """
    return (
        not entry["gate"]["failures"]
        and entry["gate"].get("bit_equal_to_hf", 0.0) >= 0.99
    )


def _compare(entries: dict) -> None:
    """Add ratios: ``times_ours`` is above 1 where ours is faster; ours has one to the
    best peer.
    """
    ours = entries[OURS]
    for direction in DIRECTIONS:
        mine = ours.get(direction, {}).get("us")
        if mine is None:
            continue
        timed = {
            name: e[direction]
            for name, e in entries.items()
            if "us" in e.get(direction, {})
        }
        for timing in timed.values():
            timing["times_ours"] = timing["us"] / mine
        others = timed.keys() - {OURS, AGAIN, EAGER}
        rivals = [timed[name]["us"] for name in others if same_numerics(entries[name])]
        ours[direction]["of_best_with_same_numerics"] = (
            min(rivals) / mine if rivals else None
        )


def run(
    shapes: dict[str, ModelShape],
    tokens: Iterable[int],
    dtype: torch.dtype,
    watch: Stopwatch,
) -> dict:
    """The measurements of `python -m benchmarks kernels`."""
    libraries, found = other_libraries()
    bandwidth = copy_bandwidth(watch) if watch.cuda else None
    best = bandwidth["best"] if bandwidth else None
    data = {
        "peers": found,
        "copy_gb_per_s": bandwidth,
        "not_measured": [] if watch.cuda else [UNTIMED],
    }

    def measured(case: Case) -> dict:
        if not watch.cuda:
            case = Case(case.kind, case.shape, case.weight_offset, False, case.models)
        return time_case(case, watch, dtype, libraries, best)

    data["cases"] = [measured(case) for case in cases(shapes, tokens)]
    data["against_layer_norm"] = []
    if watch.cuda:
        for hidden_size, length in AGAINST_LAYER_NORM:
            pair = [
                measured(Case(kind, (length, hidden_size), 0.0, True))
                for kind in ("RMSNorm", "LayerNorm")
            ]
            data["against_layer_norm"].append(
                against_layer_norm(hidden_size, length, *pair)
            )
    else:
        data["not_measured"].append("RMSNorm against LayerNorm: a comparison of times")
    return data


def against_layer_norm(
    hidden_size: int, length: int, rms_norm: dict, layer_norm: dict
) -> dict:
    """How much less time RMSNorm takes than LayerNorm, by implementation and direction:
    1 - its us / LayerNorm's us.
    """
    saved = {}
    for name, entry in rms_norm["implementations"].items():
        # which is F.layer_norm
        other = layer_norm["implementations"].get(
            EAGER if name == "F.rms_norm" else name, {}
        )
        pairs = {
            d: (entry.get(d, {}).get("us"), other.get(d, {}).get("us"))
            for d in DIRECTIONS
        }
        if all(None not in pair for pair in pairs.values()):
            saved[name] = {d: 1 - mine / theirs for d, (mine, theirs) in pairs.items()}
    return {
        "hidden_size": hidden_size,
        "sequence": length,
        "time_saved": saved,
        "cases": [rms_norm, layer_norm],
    }

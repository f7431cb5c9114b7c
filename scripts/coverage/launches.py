"""How many norms, sums and rotations of a model run as kernels, and where they are
fewer than they were.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path

import torch

import hf_rmsnorm
from hf_rmsnorm.fused import watch
from hf_rmsnorm.patching.launch_counts import Piece

from .models import outputs
from .runs import line

SUMS = (watch.SUM, watch.MODULATED_SUM)
ROTATIONS = (watch.QK, watch.ROTARY)
MODULATIONS = (watch.MODULATION, watch.MODULATED_SUM)
Counts = dict[str, int]


def by_kernels(pieces: Iterable[Piece], norms: Collection[str]) -> Counts:
    """How often a forward launched a norm, alone or with what surrounds it; and how often
    a sum, a norm of heads, a rotation and a modulation with it.

    Args:
        pieces: as `count_launches` lists them.
        norms: the paths of the patched norms.
    """
    counts: Counter = Counter()
    for piece in pieces:
        of_heads = 0
        if piece.what == watch.QK:  # its path is the attention's, or that of one norm
            of_heads = 1 if piece.path in norms else 2
        alone = piece.what not in ROTATIONS
        counts["norms"] += piece.launched * (of_heads or alone)
        counts["sums"] += piece.launched * (piece.what in SUMS)
        counts["qk_norms"] += piece.launched * of_heads
        counts["rotations"] += piece.launched * (piece.what in ROTATIONS)
        counts["modulations"] += piece.launched * (piece.what in MODULATIONS)
    return {kind: count for kind, count in counts.items() if count}


def in_each_dtype(model: torch.nn.Module, scenes: list[tuple]) -> dict[str, Counts]:
    """{dtype: counts} of forwards in Triton's interpreter; an error in place of the counts
    where the model raises one in a dtype. The model is left in float32.

    Args:
        scenes: (module, arguments) of the forwards: the model, or parts of it.
    """
    found = {}
    for dtype in dict.fromkeys((model.dtype, torch.float32)):
        if dtype == torch.float32:
            model.float()
            scenes = [(part, _in_float32(arguments)) for part, arguments in scenes]
        name = str(dtype).removeprefix("torch.")
        try:
            found[name] = of_forwards(model, scenes)
        except Exception as error:  # of any kind: some run in one dtype alone
            found[name] = {"error": line(error)}
    return found


def _in_float32(value):
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.float()
    if isinstance(value, dict):
        return {key: _in_float32(part) for key, part in value.items()}
    return list(map(_in_float32, value)) if type(value) is list else value


def of_forwards(model: torch.nn.Module, scenes: list[tuple]) -> Counts:
    """The counts of forwards in Triton's interpreter; none where no norm is patched."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a model without any norm is a result here
        report = hf_rmsnorm.patch_model(model)
    try:
        if not (report.swapped or report.layers):
            return {}
        norms = {norm.path for norm in report.swapped}
        with hf_rmsnorm.use_backend("triton"), hf_rmsnorm.count_launches(model) as ran:
            for part, arguments in scenes:
                outputs(part, arguments)
        return by_kernels(ran.pieces, norms)
    finally:
        hf_rmsnorm.unpatch_model(model)


def flat(launched: dict[str, Counts], suffix: str = "") -> Counts:
    """The counts of all dtypes in one: ``{"bfloat16 norms": 9, ...}``."""
    counts = {}
    for dtype, of_dtype in launched.items():
        for kind, count in of_dtype.items():
            if kind != "error":
                counts[f"{dtype} {kind}{suffix}"] = count
    return counts


def print_falls(before: dict[str, Counts], now: dict[str, Counts]) -> bool:
    """Name each type of `now` that launches less than before, as ``causal llama:
    bfloat16 norms 9 -> 7``; returns whether there is one.
    """
    found = False
    for name, counts in now.items():
        for kind, count in before.get(name, {}).items():
            if counts.get(kind, 0) < count:
                found = True
                words = f"{name}: {kind} {count} -> {counts.get(kind, 0)}"
                print(f"fewer launches: {words}", file=sys.stderr)
    return found


def read(file: Path) -> dict:
    """A result made earlier."""
    return json.loads(file.read_text(encoding="utf-8"))

"""Proves a recipe on everything a model will ask of the swapped forward: shapes, strides, NaN, autocast, gradients."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from ...fused.recipe import Recipe
from ...reference import reference_norm
from .closeness import close
from .inputs import NotInFamily, Trial
from .probe import Unusable


def prove(trial: Trial, recipe: Recipe, exact: bool) -> Recipe:
    """The recipe, kept from autocast where the module computes something else there.

    Args:
        exact: whether results are equal to the formula's to the last bit, or only `nearly`.

    Raises:
        NotInFamily: module and formula differ.
    """
    for dtype in (torch.float32,) if recipe.only_float32 else (torch.float32, torch.bfloat16):
        trial.randomise()
        rows = trial.rows(half=dtype == torch.bfloat16)
        three, four = rows[3:9].view(2, 3, -1), rows.view(3, 2, 2, -1).transpose(1, 2)
        for x in (rows[:5], rows[None, :1], three, four):
            if not trial.agrees(recipe, x, dtype, dtype, exact):
                raise NotInFamily(f"on {x.dim()}-dimensional input its result is not that of {recipe.spec}")
        if not _same_under_autocast(trial, recipe, three, dtype, exact):
            recipe = replace(recipe, not_under_autocast=True)
    if not _keeps_strides(trial, recipe):
        recipe = replace(recipe, row_major=True)
    _check_strange_input(trial, recipe)
    _check_gradients(trial, recipe)
    return recipe


def _keeps_strides(trial: Trial, recipe: Recipe) -> bool:
    """Whether the output of a permuted input lies in memory as the formula's does; else it is contiguous."""
    size, heads = trial.size, trial.probe.head_dim
    if recipe.layout == "channels_first":
        x = trial.normal(2, size, *(3, 5)[: recipe.dims[0] - 2])
    elif recipe.layout == "heads":
        x = trial.normal(3, 2, size // heads, heads).transpose(0, 1)
    else:
        row = (size,) if heads is None else (size // heads, heads)
        if recipe.dims is not None and max(recipe.dims) < 2 + len(row):
            return True
        x = trial.normal(3, 2, *row).transpose(0, 1)
    gate = trial.gate_for(x, recipe)
    y = trial.probe.run_as_given(x, gate)
    rows = recipe.rows_of(x)
    parameters = [trial.tensors.get(name) for name in (recipe.weight, recipe.bias)]
    spec = recipe.spec
    if heads is not None and recipe.layout == "last":
        parameters = [p if p is None else p.view(-1, heads) for p in parameters]
        spec = replace(spec, group_size=None)
    expected = reference_norm(rows, *parameters, spec, gate)
    expected = expected.movedim(-1, 1) if recipe.layout == "channels_first" else expected
    strides = [[s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1] for t in (y, expected)]
    if strides[0] == strides[1]:
        return True
    if not y.is_contiguous():
        raise NotInFamily("its output lies in memory in an order of its own")
    return False


def _check_strange_input(trial: Trial, recipe: Recipe) -> None:
    values = [trial.tensors.get(recipe.weight), trial.tensors.get(recipe.bias), recipe.spec]
    x = trial.rows()
    x[1, 0], x[2, -1] = math.nan, math.inf
    gate = trial.gate_for(x, recipe)
    if not torch.equal(trial.probe.run(x, gate).isnan(), reference_norm(x, *values, gate).isnan()):
        raise NotInFamily("it treats NaN and infinity in a way of its own")
    five = trial.rows().view(3, 2, 2, 1, -1)
    gate = trial.gate_for(five, recipe)
    try:
        y = trial.probe.run(five, gate)
    except Unusable:  # such input never reaches a forward that refuses it
        return
    if not close(y.nan_to_num(), reference_norm(five, *values, gate).nan_to_num(), 1e-3):
        raise NotInFamily(f"on 5-dimensional input its result is not that of {recipe.spec}")


def _same_under_autocast(trial: Trial, recipe: Recipe, x: torch.Tensor, dtype: torch.dtype, exact: bool) -> bool:
    def watched():
        trial.probe.set(**{name: tensor.to(dtype) for name, tensor in trial.tensors.items()})
        return trial.probe.run_watched(x.to(dtype), trial.gate_for(x.to(dtype), recipe))[1]

    seen = {watched()}
    try:
        for device_type in ("cpu", "cuda"):
            with _autocast(device_type):
                seen.add(watched())
                if not trial.agrees(recipe, x, dtype, dtype, exact):
                    return False
    except Unusable:
        return False
    return len(seen) == 1


def _check_gradients(trial: Trial, recipe: Recipe) -> None:
    names = [name for name in (recipe.weight, recipe.bias) if name]
    x = trial.normal(3, trial.size)
    x = (x + 0.5 * x.sign()).requires_grad_()
    gate = trial.gate_for(x, recipe)
    given = [x] if gate is None else [x, gate.requires_grad_()]
    dy = trial.normal(3, trial.size)
    leaves = {name: trial.tensors[name].clone().requires_grad_() for name in names}
    with torch.enable_grad():
        y = reference_norm(x, leaves.get(recipe.weight), leaves.get(recipe.bias), recipe.spec, gate)
        expected = torch.autograd.grad(y, [*given, *leaves.values()], dy)
        trial.probe.set(**leaves)
        y = trial.probe.run(x, gate)
        inputs = [*given, *(getattr(trial.probe.module, name) for name in names)]
        try:
            got = torch.autograd.grad(y, inputs, dy)
        except RuntimeError as error:
            raise NotInFamily("its output is cut off from the gradient") from error
    trial.probe.set(**trial.tensors)
    for name, a, b in zip(["input", "gate"][: len(given)] + names, got, expected, strict=True):
        if not close(a.view(b.shape), b, 1e-4, floor=1.0):
            raise NotInFamily(f"its gradient with respect to its {name} is not that of {recipe.spec}")


@contextlib.contextmanager
def _autocast(device_type: str) -> Iterator[None]:
    """What code that asks whether autocast is on would find, on a machine without that device too."""
    before = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    torch.set_autocast_enabled(device_type, True)
    torch.set_autocast_dtype(device_type, torch.bfloat16)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device_type, before[0])
        torch.set_autocast_dtype(device_type, before[1])

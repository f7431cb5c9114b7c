"""Proves a recipe on everything a model will ask of the swapped forward: shapes, strides, NaN, autocast, gradients."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from ...fused.recipe import Recipe
from ...reference import reference_norm
from .closeness import close, same_bits
from .gradients import check_gradients
from .inputs import FEW, NotInFamily, Trial
from .probe import Unusable
from .questions import check_questions

LONG, WIDE = 4200, 20_000  # a sequence that is long, a row that is longer than one tile of a kernel
MAX_ELEMENTS, SHORT = 2**17, 600  # how many a long input may have; what is not worth trying
MIXED_DTYPES = ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16))


def prove(trial: Trial, recipe: Recipe, exact: bool) -> Recipe:
    """The recipe, kept from autocast where the module computes something else there.

    Args:
        exact: whether results are equal to the formula's to the last bit, or only `nearly`.

    Raises:
        NotInFamily: module and formula differ.
    """
    dtypes = (torch.float32,) if recipe.only_float32 else (torch.float32, torch.bfloat16, torch.float16)
    for dtype in dtypes:
        if dtype != torch.float16:  # the rows of one half do for the other
            rows, uneven = trial.rows(half=dtype != torch.float32), trial.uneven(half=dtype != torch.float32)
        three, four = rows[3:9].view(2, 3, -1), rows[3:11].view(2, 2, 2, -1).transpose(1, 2)
        trial.spread(recipe, dtype)
        given = {torch.float32: (rows[:5], rows[None, :1], three, four), torch.bfloat16: (rows[:5], three)}
        for x in (*given.get(dtype, (rows[:5],)), uneven):
            if trial.size < FEW:  # too few elements for every kind of weight
                trial.spread(recipe, dtype)
            _must_agree(trial, recipe, x, dtype, dtype, exact)
        if recipe.gate_optional:
            ungated = replace(recipe, spec=replace(recipe.spec, gate=None), gate=None)
            _must_agree(trial, ungated, three, dtype, dtype, exact)
        if dtype != torch.float16 and not _same_under_autocast(trial, recipe, three[:, :1], dtype, exact):
            recipe = replace(recipe, not_under_autocast=True)
    one_dtype = recipe.weight is None or (recipe.spec.functional and recipe.spec.rounding == "once")
    for x_dtype, weight_dtype in () if one_dtype or recipe.only_float32 else MIXED_DTYPES:
        trial.spread(recipe)
        _must_agree(trial, recipe, rows[:5], x_dtype, weight_dtype, exact)
    _check_sizes(trial, recipe, exact)
    trial.randomise()
    if not _keeps_strides(trial, recipe):
        recipe = replace(recipe, row_major=True)
    for dtype in dtypes:
        _check_strange_values(trial, recipe, dtype, exact)
    _check_dimensions(trial, recipe)
    check_gradients(trial, recipe)
    check_questions(trial, recipe)
    return recipe


def _must_agree(trial: Trial, recipe: Recipe, x, x_dtype: torch.dtype, weight_dtype: torch.dtype, exact: bool) -> None:
    if trial.agrees(recipe, x, x_dtype, weight_dtype, exact):
        return
    trial.randomise()
    if trial.agrees(recipe, x, x_dtype, weight_dtype, exact):
        where = "where its weight is zero, negative, tiny or large"
    elif x_dtype != weight_dtype:
        where = "where weight and input are of two dtypes"
    else:
        where = f"on {x.dim()}-dimensional input"
    raise NotInFamily(f"{where} its result is not that of {recipe.spec}")


def _check_sizes(trial: Trial, recipe: Recipe, exact: bool) -> None:
    """Long sequences, many of them, and rows of other sizes, as far as they are affordable."""
    if recipe.weight is None and recipe.hidden_size is None:
        for size in (trial.size + 8, 3 * trial.size + 40, WIDE):
            x = trial.normal(2, 3, size)
            if not trial.agrees(recipe, x, torch.float32, torch.float32, exact):
                raise NotInFamily(f"on rows of {size} elements its result is not that of {recipe.spec}")
    with trial.narrowed(recipe, exact) as size:
        rows = min(LONG, MAX_ELEMENTS // size)
        for shape in ((1, rows), (rows, 1)) if rows >= SHORT else ():
            x = trial.normal(*shape, size)
            if not trial.agrees(recipe, x, torch.float32, torch.float32, exact):
                raise NotInFamily(f"on input of {rows} rows its result is not that of {recipe.spec}")


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


def _check_strange_values(trial: Trial, recipe: Recipe, dtype: torch.dtype, exact: bool) -> None:
    """NaN, infinity and the largest numbers, in the input and in the weight."""
    tensors = {name: tensor.to(dtype) for name, tensor in trial.tensors.items()}
    x = trial.normal(4, trial.size)
    x[1, 0], x[2, -1], x[0, 0] = math.nan, math.inf, 6e4
    if exact:  # their squares are infinite; another way to the same root need not pass through them
        x[3] *= 6e4 if dtype == torch.float16 else 1e25
    x, gate = x.to(dtype), trial.gate_for(x, recipe, dtype)
    for strange_weights in (False, True) if dtype == torch.float32 else (True,):
        for name in {recipe.weight, recipe.bias} - {None} if strange_weights else ():
            tensors[name] = tensors[name].clone()
            tensors[name][0], tensors[name][-1] = math.nan, math.inf
        trial.probe.set(**tensors)
        y = trial.probe.run(x, gate)
        expected = reference_norm(x, tensors.get(recipe.weight), tensors.get(recipe.bias), recipe.spec, gate)
        if not (same_bits(y, expected) if exact else torch.equal(y.isnan(), expected.isnan())):
            raise NotInFamily("it treats NaN and infinity, or very large numbers, in a way of its own")
    trial.probe.set(**trial.tensors)


def _check_dimensions(trial: Trial, recipe: Recipe) -> None:
    values = [trial.tensors.get(recipe.weight), trial.tensors.get(recipe.bias), recipe.spec]
    for leading in ((), (1, 2, 2, 1), (1, 2, 1, 2, 1), (2, 1, 1, 2, 1, 1)):
        x = trial.normal(*leading, trial.size)
        gate = trial.gate_for(x, recipe)
        try:
            y = trial.probe.run(x, gate)
        except Unusable:  # such input never reaches a forward that refuses it
            continue
        if not close(y, reference_norm(x, *values, gate), 1e-3):
            raise NotInFamily(f"on {x.dim()}-dimensional input its result is not that of {recipe.spec}")


def _same_under_autocast(trial: Trial, recipe: Recipe, x: torch.Tensor, dtype: torch.dtype, exact: bool) -> bool:
    def watched():
        trial.probe.set(**{name: tensor.to(dtype) for name, tensor in trial.tensors.items()})
        return trial.probe.torch_norm(x.to(dtype), trial.gate_for(x.to(dtype), recipe))

    others = [("cpu", torch.bfloat16), ("cuda", torch.float16), ("cpu", torch.float16), ("cuda", torch.bfloat16)]
    seen = {watched()}
    try:
        for device_type, autocast_dtype in others if dtype == torch.float32 else others[2:]:
            with _autocast(device_type, autocast_dtype):
                seen.add(watched())
                if not trial.agrees(recipe, x, dtype, dtype, exact):
                    return False
    except Unusable:
        return False
    return len(seen) == 1


@contextlib.contextmanager
def _autocast(device_type: str, dtype: torch.dtype) -> Iterator[None]:
    """What code that asks whether autocast is on would find, on a machine without that device too."""
    before = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    torch.set_autocast_enabled(device_type, True)
    torch.set_autocast_dtype(device_type, dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device_type, before[0])
        torch.set_autocast_dtype(device_type, before[1])

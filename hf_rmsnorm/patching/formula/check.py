"""Proves a recipe on all that a model will ask of the swapped forward: shapes, strides,
NaN, autocast, gradients.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from ...fused.recipe import Recipe
from ...reference import in_groups, reference_norm, reference_stats
from .closeness import same_bits
from .inputs import FEW, NotInFamily, Trial
from .probe import Unusable

MIXED_DTYPES = ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16))
# of the terms that a gradient is summed of; roundings of float32 are a thousand times
# smaller
TOLERANCE = 1e-4
HALF_TOLERANCE = 0.05  # in bfloat16 every operator of a backward rounds to eight bits
SCALES = (1.0, 30.0, 0.02, 1e4)  # of the rows of the input


def prove(trial: Trial, recipe: Recipe) -> Recipe:
    """The recipe, kept from autocast where the module computes something else;
    NotInFamily where the two differ.
    """
    dtypes = (
        (torch.float32,)
        if recipe.only_float32
        else (torch.float32, torch.bfloat16, torch.float16)
    )
    for dtype in dtypes:
        if dtype != torch.float16:  # the rows of one half do for the other
            rows, uneven = (
                trial.rows(half=dtype != torch.float32),
                trial.uneven(half=dtype != torch.float32),
            )
        recipe = _prove_in_dtype(trial, recipe, dtype, rows, uneven)
    if not recipe.only_float32:
        _prove_mixed_dtypes(trial, recipe, rows[:5])
    if recipe.weight is None and recipe.hidden_size is None:
        for size in (trial.size + 8, 3 * trial.size + 40):
            _must_agree(
                trial,
                recipe,
                trial.normal(2, 3, size),
                where=f"on rows of {size} elements",
            )
    trial.randomise()
    if not _keeps_strides(trial, recipe):
        recipe = replace(recipe, row_major=True)
    for dtype in dtypes:
        _check_strange_values(trial, recipe, dtype)
    for leading in ((), (1, 2, 2, 1), (1, 2, 1, 2, 1), (2, 1, 1, 2, 1, 1)):
        if _takes(trial, recipe, *leading) is False:
            # its fused forward never gets a shape that it refuses
            raise NotInFamily(
                f"on {len(leading) + 1}-dimensional input its result is not that of {recipe.spec}"
            )
    _check_gradients(trial, recipe)
    return recipe


def _prove_in_dtype(
    trial: Trial,
    recipe: Recipe,
    dtype: torch.dtype,
    rows: torch.Tensor,
    uneven: torch.Tensor,
) -> Recipe:
    """The recipe, once it agrees on these rows, seen in several shapes and under
    autocast.
    """
    three = rows[3:9].view(2, 3, -1)
    four = rows[3:11].view(2, 2, 2, -1).transpose(1, 2)
    shapes = {
        torch.float32: (rows[:5], rows[None, :1], three, four),
        torch.bfloat16: (rows[:5], three),
        torch.float16: (rows[:5],),
    }
    trial.spread(recipe, dtype)
    for x in (*shapes[dtype], uneven):
        if trial.size < FEW:  # too few elements for every kind of weight
            trial.spread(recipe, dtype)
        _must_agree(trial, recipe, x, dtype, dtype)
    if recipe.gate_optional:
        ungated = replace(recipe, spec=replace(recipe.spec, gate=None), gate=None)
        _must_agree(trial, ungated, three, dtype, dtype)
    if dtype != torch.float16 and not _same_under_autocast(
        trial, recipe, three[:, :1].to(dtype)
    ):
        return replace(recipe, not_under_autocast=True)
    return recipe


def _prove_mixed_dtypes(trial: Trial, recipe: Recipe, x: torch.Tensor) -> None:
    if recipe.weight is None or (
        recipe.spec.functional and recipe.spec.rounding == "once"
    ):
        return  # both have one dtype
    for mixed in MIXED_DTYPES:
        trial.spread(recipe)
        _must_agree(trial, recipe, x, *mixed)


def _must_agree(
    trial: Trial, recipe: Recipe, x: torch.Tensor, *dtypes: torch.dtype, where: str = ""
) -> None:
    if trial.agrees(recipe, x, *dtypes):
        return
    if not where:
        trial.randomise()
        if trial.agrees(recipe, x, *dtypes):
            where = "where its weight is zero, negative, tiny or large"
        elif len(set(dtypes)) > 1:
            where = "where weight and input are of two dtypes"
        else:
            where = f"on {x.dim()}-dimensional input"
    raise NotInFamily(f"{where} its result is not that of {recipe.spec}")


def _takes(trial: Trial, recipe: Recipe, *leading: int) -> bool | None:
    """Whether module and formula agree on so many rows; None where the module does not
    take them.
    """
    with contextlib.suppress(Unusable):
        return trial.agrees(recipe, trial.normal(*leading, trial.size))


def _keeps_strides(trial: Trial, recipe: Recipe) -> bool:
    """Whether the output of a permuted input has the strides of the formula's output;
    else it is contiguous.
    """
    size, heads, spec = trial.size, trial.probe.head_dim, recipe.spec
    parameters = trial.parameters(recipe)
    if recipe.layout == "channels_first":
        x = trial.normal(2, size, *(3, 5)[: recipe.dims[0] - 2])
    else:
        row = (size,) if heads is None else (size // heads, heads)
        if recipe.dims is not None and max(recipe.dims) < 2 + len(row):
            return True
        x = trial.normal(3, 2, *row).transpose(0, 1)
    gate = trial.gate_for(x, recipe)
    y = trial.probe.run_as_given(x, gate)
    if heads is not None:
        parameters = [p if p is None else p.view(-1, heads) for p in parameters]
        spec = replace(spec, group_size=None)
    expected = reference_norm(recipe.rows_of(x), *parameters, spec, gate)
    expected = (
        expected.movedim(-1, 1) if recipe.layout == "channels_first" else expected
    )
    keeps = _strides(y) == _strides(expected)
    if not keeps and not y.is_contiguous():
        raise NotInFamily("its output lies in memory in an order of its own")
    return keeps


def _strides(t: torch.Tensor) -> list[int]:
    """The strides that matter: those of dimensions with more than one element."""
    return [
        stride for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1
    ]


def _check_strange_values(trial: Trial, recipe: Recipe, dtype: torch.dtype) -> None:
    """NaN, infinity and the largest numbers, in the input and in the weight."""
    x = trial.normal(4, trial.size)
    x[1, 0] = math.nan
    x[2, -1] = math.inf
    x[0, 0] = 6e4
    if trial.exact:
        # their squares are infinite; another way to the same root need not pass through
        # them
        x[3] *= 6e4 if dtype == torch.float16 else 1e25
    x, gate = x.to(dtype), trial.gate_for(x, recipe, dtype)
    parameters = trial.parameters(recipe, dtype)
    names = recipe.weight, recipe.bias
    tensors = {
        name: p for name, p in zip(names, parameters, strict=True) if name is not None
    }
    for strange_weights in (False, True) if dtype == torch.float32 else (True,):
        if strange_weights:
            for parameter in tensors.values():
                parameter[0] = math.nan
                parameter[-1] = math.inf
        with trial.in_dtype(dtype), trial.probe.having(**tensors):
            y = trial.probe.run(x, gate)
        expected = reference_norm(x, *parameters, recipe.spec, gate)
        same = (
            same_bits(y, expected)
            if trial.exact
            else torch.equal(y.isnan(), expected.isnan())
        )
        if not same:
            raise NotInFamily(
                "it treats NaN and infinity, or very large numbers, in a way of its own"
            )


def _same_under_autocast(trial: Trial, recipe: Recipe, x: torch.Tensor) -> bool:
    def watched() -> str | None:
        with trial.in_dtype(x.dtype):
            return trial.probe.torch_norm(x, trial.gate_for(x, recipe))

    others = [
        ("cpu", torch.bfloat16),
        ("cuda", torch.float16),
        ("cpu", torch.float16),
        ("cuda", torch.bfloat16),
    ]
    if x.dtype != torch.float32:
        others = others[2:]
    plain = watched()
    with contextlib.suppress(Unusable):
        for device_type, autocast_dtype in others:
            with _autocast(device_type, autocast_dtype):
                if watched() != plain or not trial.agrees(recipe, x, x.dtype, x.dtype):
                    return False
        return True
    return False


@contextlib.contextmanager
def _autocast(device_type: str, dtype: torch.dtype) -> Iterator[None]:
    """What code that asks whether autocast is on would find, on a machine without that
    device too.
    """
    before = (
        torch.is_autocast_enabled(device_type),
        torch.get_autocast_dtype(device_type),
    )
    torch.set_autocast_enabled(device_type, True)
    torch.set_autocast_dtype(device_type, dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device_type, before[0])
        torch.set_autocast_dtype(device_type, before[1])


def _check_gradients(trial: Trial, recipe: Recipe) -> None:
    """Compare with the formula's own gradients, whatever the size of what comes in from
    either side.
    """
    trial.randomise()
    _compare(trial, recipe, (1.0, 1e-4, 1e8, 1e-7))
    _compare(trial, recipe, (1e4, math.nan, 1e4, 1e4))
    if not recipe.only_float32:
        some = recipe.weight is None
        _compare(
            trial, recipe, (1.0, 1e-4, 1e4, 1.0), of_weights=some, dtype=torch.bfloat16
        )
    trial.spread(recipe)
    _compare(trial, recipe, (1e-4, 1e-4, 1e-4, 1e-4), of_x=recipe.weight is None)


def _compare(
    trial, recipe, scales: tuple, of_x=True, of_weights=True, dtype=torch.float32
) -> None:
    """Compare the gradients of input, gate, weights, or some of them, where those of
    the output are so large by row.
    """
    spec = recipe.spec
    inputs, dy = _gradient_operands(trial, recipe, scales, of_x, dtype)
    x, gate = inputs["input"], inputs.get("gate")
    names = [name for name in (recipe.weight, recipe.bias) if name]
    leaves = {
        name: trial.tensors[name].to(dtype).requires_grad_(of_weights) for name in names
    }
    weight, bias = leaves.get(recipe.weight), leaves.get(recipe.bias)
    wanted = [*(inputs if of_x else ()), *(names if of_weights else ())]
    with trial.probe.with_gradients(of_weights), trial.probe.having(**leaves):
        y = reference_norm(x, weight, bias, spec, gate)
        dy = dy.to(y.dtype)
        expected = torch.autograd.grad(
            y, [{**inputs, **leaves}[name] for name in wanted], dy
        )
        got = _module_gradients(trial, inputs, wanted, dy)
    terms = _terms(x, weight, dy, gate, spec) if trial.group < FEW else None
    tolerance = TOLERANCE if dtype == torch.float32 else HALF_TOLERANCE
    for name, a, b in zip(wanted, got, expected, strict=True):
        a, b = a.view(b.shape), b.detach()
        allowed = tolerance * _size_of_terms(name, b, x, terms)
        if ((a - b).abs() > allowed).any() or not torch.equal(a.isnan(), b.isnan()):
            where = "" if dtype == torch.float32 else " in bfloat16"
            raise NotInFamily(
                f"its gradient with respect to its {name} is not that of {spec}{where}"
            )


def _gradient_operands(
    trial, recipe, scales: tuple, of_x: bool, dtype: torch.dtype
) -> tuple[dict, torch.Tensor]:
    """(the input, and the gate if there is one, by name; a gradient of the output, so
    large by row; NaN: has one).
    """
    x = trial.normal(len(SCALES), trial.size)
    x = (
        ((x + 0.5 * x.sign()) * torch.tensor(SCALES, dtype=torch.float32)[:, None])
        .to(dtype)
        .requires_grad_(of_x)
    )
    gate = trial.gate_for(x, recipe)
    inputs = (
        {"input": x}
        if gate is None
        else {"input": x, "gate": gate.requires_grad_(of_x)}
    )
    dy = (
        trial.normal(*x.shape)
        * torch.tensor(scales, dtype=torch.float32).nan_to_num(1.0)[:, None]
    )
    dy[[scale != scale for scale in scales], 0] = math.nan
    return inputs, dy


def _module_gradients(
    trial, inputs: dict, wanted: list[str], dy: torch.Tensor
) -> tuple:
    """The gradients that the module's own code gives, of inputs and of its parameters
    by name.
    """
    try:
        y = trial.probe.run(inputs["input"], inputs.get("gate"))
        leaves = [
            inputs[name] if name in inputs else getattr(trial.probe.module, name)
            for name in wanted
        ]
        return torch.autograd.grad(y, leaves, dy)
    except RuntimeError as error:
        raise NotInFamily("its output is cut off from the gradient") from error


def _size_of_terms(
    name: str, gradient: torch.Tensor, x: torch.Tensor, terms: tuple | None
) -> torch.Tensor:
    """The size of a gradient's summands, by row; for long rows the size of the gradient
    itself.
    """
    size = gradient.abs().nan_to_num_().amax(-1, keepdim=True)
    if terms is None:
        return size
    # The gradient of a short row is the difference of terms that are nearly equal.
    rows, total = terms
    if name == "input":
        summed = rows
    elif name == "gate":
        summed = rows * x.abs().amax(-1, keepdim=True)
    else:
        summed = total
    return size.maximum(summed.to(size.dtype))


@torch.no_grad()
def _terms(x, weight, dy, gate, spec) -> tuple[torch.Tensor, torch.Tensor]:
    """The size of the gradients' summands: of x, (rows, 1); and of the parameters, ()."""
    x = x.double()
    dy = dy.double().nan_to_num().abs()
    gate = None if gate is None else gate.double()
    if spec.group_size is None:
        rstd, _ = reference_stats(x, spec, gate)
    else:
        rows, gates = in_groups(spec.group_size, x, gate)
        rstd, _ = reference_stats(rows, spec.ungrouped, gates)
    rstd = rstd.double().view(len(x), -1).amax(-1, keepdim=True)
    scale = 1.0
    if weight is not None:
        scale = (weight.double() + spec.weight_offset).abs().amax()
    if gate is not None:
        scale = scale * (1 + gate.abs().amax())
    dx = rstd * scale * dy.amax(-1, keepdim=True)
    return dx, dy.amax()

"""Proves that a module's backward is that of its formula, whatever the size of what comes in from either side."""

from __future__ import annotations

import math

import torch

from ...fused.recipe import Recipe
from ...reference import in_groups, reference_norm, reference_stats
from .inputs import FEW, NotInFamily, Trial

TOLERANCE = 1e-4  # of the terms that a gradient is summed of; roundings of float32 are a thousand times smaller
HALF_TOLERANCE = 0.05  # in bfloat16 every operator of a backward rounds to eight bits
SCALES = (1.0, 30.0, 0.02, 1e4)  # of the rows of the input


def check_gradients(trial: Trial, recipe: Recipe) -> None:
    """Compare with the formula's own gradients, element by element.

    Raises:
        NotInFamily: they differ.
    """
    trial.randomise()
    _compare(trial, recipe, (1.0, 1e-4, 1e8, 1e-7))
    _compare(trial, recipe, (1e4, math.nan, 1e4, 1e4), train=True)
    if not recipe.only_float32:
        some = recipe.weight is None
        _compare(trial, recipe, (1.0, 1e-4, 1e4, 1.0), train=True, of_weights=some, dtype=torch.bfloat16)
    trial.spread(recipe)
    _compare(trial, recipe, (1e-4, 1e-4, 1e-4, 1e-4), train=True, of_x=recipe.weight is None)


def _compare(trial, recipe, scales: tuple, train=False, of_x=True, of_weights=True, dtype=torch.float32) -> None:
    """Compare the gradients of input, gate, weights, or some of them, where those of the output are so large by row."""
    probe, spec = trial.probe, recipe.spec
    names = [name for name in (recipe.weight, recipe.bias) if name]
    x = trial.normal(len(SCALES), trial.size)
    x = ((x + 0.5 * x.sign()) * torch.tensor(SCALES, dtype=torch.float32)[:, None]).to(dtype).requires_grad_(of_x)
    gate = trial.gate_for(x, recipe)
    given = {"input": x} if gate is None else {"input": x, "gate": gate.requires_grad_(of_x)}
    dy = trial.normal(*x.shape) * torch.tensor(scales, dtype=torch.float32).nan_to_num(1.0)[:, None]
    dy[[scale != scale for scale in scales], 0] = math.nan
    leaves = {name: trial.tensors[name].to(dtype).requires_grad_(of_weights) for name in names}
    weight, bias = leaves.get(recipe.weight), leaves.get(recipe.bias)
    wanted = (list(given) if of_x else []) + (names if of_weights else [])
    with torch.enable_grad():
        y = reference_norm(x, weight, bias, spec, gate)
        dy = dy.to(y.dtype)
        expected = torch.autograd.grad(y, [{**given, **leaves}[name] for name in wanted], dy)
        probe.module.training = train
        probe.set(**leaves)
        try:
            y = probe.run(x, gate)
            inputs = [given[name] if name in given else getattr(probe.module, name) for name in wanted]
            got = torch.autograd.grad(y, inputs, dy)
        except RuntimeError as error:
            raise NotInFamily("its output is cut off from the gradient") from error
        finally:
            probe.module.training = False
            probe.set(**trial.tensors)
    tolerance = TOLERANCE if dtype == torch.float32 else HALF_TOLERANCE
    rows, total = _terms(x, weight, dy, gate, spec) if trial.group < FEW else (None, None)
    for name, a, b in zip(wanted, got, expected, strict=True):
        a, b = a.view(b.shape), b.detach()
        terms = b.abs().nan_to_num_().amax(-1, keepdim=True)
        if rows is not None:  # what is left of a short row is the difference of terms that are nearly equal
            own = rows if name == "input" else rows * x.abs().amax(-1, keepdim=True) if name == "gate" else total
            terms = terms.maximum(own.to(terms.dtype))
        if ((a - b).abs() > tolerance * terms).any() or not torch.equal(a.isnan(), b.isnan()):
            where = "" if dtype == torch.float32 else " in bfloat16"
            raise NotInFamily(f"its gradient with respect to its {name} is not that of {spec}{where}")


@torch.no_grad()
def _terms(x, weight, dy, gate, spec) -> tuple[torch.Tensor, torch.Tensor]:
    """The size of what is summed to the gradients: of x, (rows, 1); and of the parameters, ()."""
    x, dy = x.double(), dy.double().nan_to_num()
    weight, gate = (None if t is None else t.double() for t in (weight, gate))
    grouped = (x, weight, gate) if spec.group_size is None else in_groups(spec.group_size, x, weight, gate)
    rstd = reference_stats(grouped[0], spec.ungrouped if spec.group_size else spec, *grouped[1:])[0]
    rstd = rstd.double().view(len(x), -1).amax(-1, keepdim=True)
    scale = 1.0 if weight is None else (weight + spec.weight_offset).abs().amax()
    scale = scale if gate is None else scale * (1 + gate.abs().amax())
    dx = rstd * scale * dy.abs().amax(-1, keepdim=True)
    return dx, (dx * x.abs()).amax() if spec.weight_first else dy.abs().amax()

"""Find the LayerNorms of a float64 model by their outputs, and not by the names of
their classes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import torch

from ...formula import NormSpec
from ...reference import reference_norm
from ...verification.context import is_float
from .run import MISFITS, in_double, leaves, run, weight_axis

# of the largest output; a wrong formula or eps is off by 1e-6 and more
TOLERANCE = 1e-9
USUAL_EPS = (1e-5, 1e-6, 1e-12)  # tried for a module that has no eps as an attribute


@dataclass(frozen=True)
class ModelNorm:
    """A LayerNorm of a float64 model, over the last dimension, whose length is
    `hidden_size`.
    """

    spec: NormSpec
    hidden_size: int
    # float64, as it is stored; it broadcasts to the input from the right
    weight: torch.Tensor | None
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The norm of x."""
        # as torch returns it
        return reference_norm(x, self.weight, self.bias, self.spec).contiguous()

    @property
    def as_rms(self) -> ModelNorm:
        """The RMSNorm with the same eps and parameters."""
        return replace(self, spec=replace(self.spec, centered=False))


Norms = dict[str, ModelNorm]  # by path


@torch.no_grad()
def find_layer_norms(model: torch.nn.Module, inputs: dict) -> tuple[Norms, list[str]]:
    """(path -> norm, in the order they run; paths of norms that were not called).

    Every module without children whose output has the shape of its input is given new
    rows of several sizes and means and compared with the formula; one that was not
    called, with rows of the length of its parameters.
    """
    paths = leaves(model)
    seen: dict[str, tuple] = {}

    def note(path, args, output):
        if (
            args
            and is_float(args[0])
            and torch.is_tensor(output)
            and args[0].shape == output.shape
        ):
            seen[path] = args

    run(model, inputs, paths, note)
    found = {
        path: norm
        for path, args in seen.items()
        if (norm := _recognise(model.get_submodule(path), args))
    }
    silent = [
        path
        for path in paths
        if path not in seen and _is_layer_norm(model.get_submodule(path))
    ]
    return found, silent


def _is_layer_norm(module: torch.nn.Module) -> bool:
    """Whether a module that was not called computes a LayerNorm of rows as long as its
    parameters, or its shape.
    """
    own = {p.shape for p in module.parameters(recurse=False)}
    shape = getattr(module, "normalized_shape", None)
    if isinstance(shape, (tuple, list)):
        own.add(torch.Size(shape))
    for shape in own:
        if 0 < len(shape) < 3:
            x = torch.empty(2, 3, *shape, dtype=torch.float64)
            if _recognise(module, (x,)) is not None:
                return True
    return False


@lru_cache(maxsize=16)
def _rows(shape: torch.Size) -> torch.Tensor:
    """Rows of several sizes and means."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(shape, generator=generator, dtype=torch.float64) + 0.5
    return rows * 10.0 ** torch.randint(-3, 1, (*shape[:-1], 1), generator=generator)


def _recognise(module: torch.nn.Module, args: tuple) -> ModelNorm | None:
    """The LayerNorm that a module computes of its first argument, if it computes one."""
    x = args[0].detach()
    if not x.ndim or x.shape[-1] < 2 or weight_axis(module) is not None:
        # the quickest way to tell most of the rest
        return None
    rows = _rows(x.shape)
    try:
        with in_double():
            y = module(rows.clone(), *args[1:])
    except MISFITS:
        # a module of another kind, whose inputs have to be of another kind too
        return None
    if not torch.is_tensor(y) or y.shape != x.shape:
        return None
    bound = TOLERANCE * y.abs().max().clamp_min(1e-30)
    for norm in _candidates(module, x):
        if bool(((norm(rows) - y).abs() <= bound).all()):
            return norm
    return None


def _candidates(module: torch.nn.Module, x: torch.Tensor) -> Iterator[ModelNorm]:
    """The LayerNorms that a module may compute, by its parameters and the numbers that
    it holds.
    """
    own = []
    for p in module.parameters(recurse=False):
        if p.shape == x.shape[x.ndim - p.ndim :]:
            own.append(p.detach().double())
    numbers = [
        v for v in vars(module).values() if isinstance(v, float) and 0 <= v < math.inf
    ]
    all_eps = dict.fromkeys((*numbers, *USUAL_EPS))
    weights = [(None, 0.0), *((p, offset) for offset in (0.0, 1.0) for p in own)]
    for eps, (weight, offset), bias in product(all_eps, weights, (None, *own)):
        spec = NormSpec(
            True, eps, weight is not None, bias is not None, weight_offset=offset
        )
        yield ModelNorm(spec, x.shape[-1], weight, bias)

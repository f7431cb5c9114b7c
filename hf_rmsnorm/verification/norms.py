"""Calls of the modules that a candidate changes, recorded in the reference's run, with
the expected outputs.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ..fused.norm import fused_part, recipe_of
from ..ops import use_backend


@dataclass
class Expected:
    """The original's output, and how near to it another one can be."""

    y: torch.Tensor
    dtype: torch.dtype  # of the input
    largest_term: torch.Tensor  # per row, the size of what y's elements are sums of
    # per row, by how much rounding errors of the input grow: 1 + |mean|/std if centred
    amplification: torch.Tensor


@dataclass
class NormCall:
    """One call of a module: its arguments, copied, down to some rows.

    Attributes:
        values, structure: the arguments, flattened.
        place: of the input among the values; None where no argument is a floating
            tensor to compare.
        expected: None where the output has another shape than the input.
    """

    reference: nn.Module
    candidate: nn.Module
    values: tuple = ()
    structure: TreeSpec | None = None
    place: int | None = None
    expected: Expected | None = None

    def run(self, call: Callable, x: torch.Tensor | None = None):
        """What ``call`` returns for these arguments, with another input where one is
        given.
        """
        values = list(self.values)
        if x is not None:
            values[self.place] = x
        args, kwargs = tree_unflatten(values, self.structure)
        return call(*args, **kwargs)

    def expect(self, call: Callable) -> None:
        """Set the expected output to the result of ``call`` on the arguments."""
        x = self.values[self.place]
        y = self.run(call)
        if isinstance(y, torch.Tensor) and y.shape == x.shape:
            self.expected = _expected(partial(self.run, call), x, y)


def rows_of(calls: list[NormCall]) -> torch.Tensor | None:
    """The input of a patched norm's first call, if that takes one tensor of rows and
    computes its own formula.
    """
    call = next((call for call in calls if call.place is not None), None)
    if call is None or len(call.values) != 1 or call.values[0].dim() < 2:
        return None
    norm = call.candidate
    comparable = keeps_formula(type(norm)) and not any(
        p.is_meta for p in norm.parameters()
    )
    return call.values[0] if comparable else None


@torch.no_grad()
def run_reference(calls: Iterable[NormCall]) -> None:
    """Set the expected outputs of calls, by the reference's modules."""
    for call in calls:
        if call.place is not None:
            call.expect(call.reference)


@torch.no_grad()
def run_stated_orders(calls: Iterable[NormCall]) -> None:
    """Set the expected outputs of norms that round as a server does: that order of
    rounding, in plain torch.
    """
    for call in calls:
        if call.place is not None and rounds_otherwise(call.candidate):
            with use_backend("reference"):
                call.expect(
                    partial(fused_part(type(call.candidate)).forward, call.candidate)
                )


@contextmanager
def recording_norms(
    reference: nn.Module, candidate: nn.Module, paths: Iterable[str], rows: int
) -> Iterator[dict[str, list[NormCall]]]:
    """Record, per path, calls of the reference's module until about ``rows`` rows of
    its last dimension were seen.
    """
    calls: dict[str, list[NormCall]] = {path: [] for path in paths}
    seen = dict.fromkeys(calls, 0)

    def record(path: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        other = candidate.get_submodule(path)
        x = next(
            (v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)), None
        )
        if x is None or not x.is_floating_point() or x.dim() == 0 or x.numel() == 0:
            if not calls[path]:
                calls[path].append(NormCall(module, other))
        elif seen[path] < rows:
            lead = _first_rows(x, getattr(module, "weight", None), rows - seen[path])
            seen[path] += math.prod(lead) * math.prod(x.shape[len(lead) : -1])
            values, structure = tree_flatten((args, kwargs))
            place = next(i for i, value in enumerate(values) if value is x)
            copied = tuple(_cut(value, x.shape, lead) for value in values)
            calls[path].append(NormCall(module, other, copied, structure, place))

    with ExitStack() as stack:
        for path in calls:
            module = reference.get_submodule(path)
            stack.callback(
                module.register_forward_pre_hook(
                    partial(record, path), with_kwargs=True
                ).remove
            )
        yield calls


def _first_rows(x: torch.Tensor, weight, rows: int) -> tuple[int, ...]:
    """Sizes to cut the first two dimensions to, at most, so that about ``rows`` rows
    remain.

    Dimensions that a weight spans are not cut.
    """
    free = x.dim() - 1
    if isinstance(weight, torch.Tensor):
        # The weight spans another dimension, or it may: images with their channels
        # first.
        other = (
            weight.shape != x.shape[-weight.dim() :] or weight.shape[:1] == x.shape[1:2]
        )
        free = 1 if other else x.dim() - weight.dim()
    lead = list(x.shape[: min(free, 2)])
    inner = math.prod(x.shape[len(lead) : -1])
    for i in range(len(lead)):
        lead[i] = max(1, min(lead[i], rows // (math.prod(lead[i + 1 :]) * inner)))
    return tuple(lead)


def _cut(value, shape: torch.Size, lead: tuple[int, ...]):
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape[: len(lead)] == shape[: len(lead)]:
        value = value[tuple(slice(n) for n in lead)]
    return value.detach().clone()


def _expected(norm: Callable, x: torch.Tensor, y: torch.Tensor) -> Expected:
    """The expected output y = norm(x), with its bias and centring as the outputs for
    constant rows show them.
    """

    def constant(value: float) -> torch.Tensor:
        return norm(torch.full_like(x, value)).double().nan_to_num()

    bias = constant(0.0)  # xhat is 0 there
    amplification = torch.ones_like(x[..., :1], dtype=torch.float64)
    if torch.equal(constant(1.0), bias):  # xhat is 0 there too: centred
        spread, mean = torch.std_mean(x.double(), -1, correction=0, keepdim=True)
        amplification += mean.abs() / spread.clamp_min(1e-30)
    terms = (y.double() - bias).abs() * amplification + bias.abs()
    return Expected(y, x.dtype, terms.amax(-1, keepdim=True), amplification)


def keeps_formula(cls: type) -> bool:
    """Whether this is a patched norm that computes what its own class does; a converted
    checkpoint's does not.
    """
    recipe = getattr(cls, "_hf_rmsnorm_recipe", None)
    return recipe is not None and not recipe.as_rms


def rounds_otherwise(norm: nn.Module) -> bool:
    """Whether this is a patched norm that rounds as a server does, not as its own
    class.
    """
    recipe = recipe_of(norm)
    return recipe is not None and recipe.numerics != "model"

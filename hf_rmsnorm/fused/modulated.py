"""The norm of an adaptive LayerNorm with the scale and shift behind it, and a gated sum
before it.

A forward calls these functions once it was compiled again from its own source, by
`patching.layers.sums`.
"""

from dataclasses import dataclass, replace
from types import CodeType
from typing import NamedTuple

import torch

from ..ops.modulated import modulated_norm, why_apart
from .layer import operands_ahead
from .watch import MODULATED_SUM, MODULATION, note, watchers


class Factor(NamedTuple):
    """In the place of a scale: ``1 + scale``, which the forward has computed before."""

    value: torch.Tensor


# Code of a function that only scales a norm's result -> whether it shifts it too.
HELPERS: dict[CodeType, bool] = {}


def later(x, norm, helper):
    """``norm(x)``, or an object that computes it with the scale and shift of a helper,
    for that helper.
    """
    shifts = HELPERS.get(getattr(helper, "__code__", None))
    if shifts is None or torch.compiler.is_compiling():
        return norm(x)
    if operands_ahead(norm, restricted=True) is None:
        return norm(x)
    return _Later(x, norm, shifts)


@dataclass(frozen=True)
class _Later:
    """A norm of x that is not computed yet; with a factor, once it was multiplied."""

    x: torch.Tensor
    norm: torch.nn.Module
    shifts: bool
    factor: torch.Tensor | None = None

    def __mul__(self, factor):
        if self.shifts:
            return replace(self, factor=factor)
        return modulated(self.x, self.norm, Factor(factor))

    def __add__(self, shift):
        return modulated(self.x, self.norm, Factor(self.factor), shift)


def modulated(x, norm, scale, *shift):
    """``norm(x) * (1 + scale) + shift``, in one launch where that gives the same bits.

    Args:
        x, shift: whatever the forward computes with; no shift where it adds nothing.
        scale: the same, or a `Factor`.
    """
    both = _in_one_launch(norm, x, None, None, scale, *shift)
    if watchers:
        _note(MODULATION, both is not None, norm, x, None, None, scale, *shift)
    if both is not None:
        return both[1]
    y = norm(x) * (scale.value if type(scale) is Factor else 1 + scale)
    return y + shift[0] if shift else y


def add_and_modulate(left, right, factor, norm, scale, *shift, seen=False) -> tuple:
    """(``left + right * factor``, ``norm(that) * (1 + scale) + shift``), in one launch
    where that gives the same bits.

    Args:
        factor: None where the forward adds no product.
        seen: as of `sums.add_and_norm`.
    """
    x, gate = right, factor
    if type(x) is type(gate) is torch.Tensor:
        # A gate is smaller, or a part of a larger tensor.
        sizes = [(t.numel(), t.is_contiguous()) for t in (x, gate)]
        x, gate = (gate, x) if sizes[1] > sizes[0] else (x, gate)
    if not (seen and torch.is_grad_enabled()):
        operands = norm, x, left, gate, scale, *shift
        both = _in_one_launch(*operands)
        if watchers:
            _note(MODULATED_SUM, both is not None, *operands)
        if both is not None:
            return both
    total = left + (right if factor is None else right * factor)
    return total, modulated(total, norm, scale, *shift)


def _in_one_launch(norm, x, residual, gate, scale, *shift) -> tuple | None:
    """(sum or None, result); None where no single launch gives them with the same bits."""
    operands = _operands(norm, x, residual, gate, scale, *shift)
    if operands is None:
        return None
    return modulated_norm(*operands, type(scale) is not Factor)


def _operands(norm, x, residual, gate, scale, *shift) -> tuple | None:
    """What `modulated_norm` takes; None where the norm has to be called, or is another
    formula of this x.
    """
    scale = scale.value if type(scale) is Factor else scale
    others = [t for t in (residual, gate) if t is not None]
    if not all(type(t) is torch.Tensor for t in (x, *others, scale, *shift)):
        return None
    parameters = operands_ahead(norm, restricted=True)
    if parameters is None:
        return None
    weight, bias, spec = parameters
    recipe = type(norm)._hf_rmsnorm_recipe
    if residual is not None and not recipe.rounds_sum:
        return None
    if not recipe.fits(x, weight, bias) or recipe.rows_of(x) is not x:
        return None
    if recipe.row_major and residual is None:
        # as the norm's result is, whatever the strides of x
        x = x.contiguous()
    return spec, (x, weight, bias, scale, *(shift or [None]), gate, residual)


def _note(piece: str, launched: bool, norm, x, *others) -> None:
    """Tell watchers of a piece, with the reason why no launch computed it."""
    operands = None if launched else _operands(norm, x, *others)
    note(piece, (norm,), x, "" if operands is None else why_apart(*operands))

"""The norm of an adaptive LayerNorm with the scale and shift behind it, and a gated sum
before it.

A forward calls these functions once it was compiled again from its own source, by
`patching.layers.sums`.
"""

from types import CodeType
from typing import NamedTuple

import torch

from ..ops.direct import under_transform
from ..ops.modulated import modulated_norm, why_apart
from .layer import operands_ahead
from .watch import MODULATED_SUM, MODULATION, note, watchers

_is_compiling = torch.compiler.is_compiling


class Product(NamedTuple):
    """``left * right``, one side of a sum, which is computed with the sum."""

    left: torch.Tensor
    right: torch.Tensor


class Factor(NamedTuple):
    """In the place of a scale: ``1 + scale``, which the forward has computed before."""

    value: torch.Tensor


# Code of a function that only scales a norm's result -> whether it shifts the result
# too.
HELPERS: dict[CodeType, bool] = {}


def later(x, norm, helper):
    """``norm(x)``, or an object that computes it with the scale and shift of a helper,
    for that helper.
    """
    shifts = HELPERS.get(getattr(helper, "__code__", None))
    if (
        shifts is None
        or _is_compiling()
        or under_transform()
        or operands_ahead(norm, restricted=True) is None
    ):
        return norm(x)
    return _Later(x, norm, shifts)


class _Later(NamedTuple):
    """A norm of x that is not computed yet."""

    x: torch.Tensor
    norm: torch.nn.Module
    shifts: bool

    def __mul__(self, factor):
        return (
            _Scaled(*self[:2], factor)
            if self.shifts
            else modulated(self.x, self.norm, Factor(factor))
        )


class _Scaled(NamedTuple):
    """A `_Later` that was multiplied."""

    x: torch.Tensor
    norm: torch.nn.Module
    factor: torch.Tensor

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
    return _one_by_one(norm(x), scale, *shift) if both is None else both[1]


def add_and_modulate(left, right, norm, scale, *shift) -> tuple:
    """(``left + right``, ``norm(left + right) * (1 + scale) + shift``), in one launch
    where that gives the same bits.

    Args:
        left, right: summands; at most one is a `Product`.
    """
    x, residual, gate = _parts(left, right)
    both = (
        None
        if residual is None
        else _in_one_launch(norm, x, residual, gate, scale, *shift)
    )
    if watchers:
        _note(MODULATED_SUM, both is not None, norm, x, residual, gate, scale, *shift)
    if both is not None:
        return both
    total = _computed(left) + _computed(right)
    return total, modulated(total, norm, scale, *shift)


def add_and_modulate_seen(left, right, norm, scale, *shift) -> tuple:
    """`add_and_modulate` of a sum that something else gets hold of: one by one where
    gradients are asked for.

    In one launch the gradient of the sum, as a hook on it sees it, would lack what
    comes by the norm.
    """
    if not torch.is_grad_enabled():
        return add_and_modulate(left, right, norm, scale, *shift)
    total = _computed(left) + _computed(right)
    return total, modulated(total, norm, scale, *shift)


def modulated_sum(left, right, norm, scale, *shift):
    """``norm(left + right) * (1 + scale) + shift``."""
    return add_and_modulate(left, right, norm, scale, *shift)[1]


def _one_by_one(normed, scale, *shift):
    y = normed * (scale.value if type(scale) is Factor else 1 + scale)
    return y + shift[0] if shift else y


def _computed(summand):
    return summand.left * summand.right if type(summand) is Product else summand


def _parts(left, right) -> tuple:
    """(x, residual, gate of x or None) of a sum; residual is None where a summand is no
    plain tensor.
    """
    if type(left) is Product:
        left, right = right, left
    if type(right) is not Product:
        return right, left, None
    if not all(type(t) is torch.Tensor for t in (left, *right)):
        return None, None, None
    # A gate is smaller, or a part of a larger tensor.
    x, gate = sorted(right, key=lambda t: (t.numel(), t.is_contiguous()), reverse=True)
    return x, left, gate


def _in_one_launch(norm, x, residual, gate, scale, *shift) -> tuple | None:
    """(sum or None, result); None where no single launch gives them with the same bits."""
    operands = _operands(norm, x, residual, gate, scale, *shift)
    return (
        None
        if operands is None
        else modulated_norm(*operands, type(scale) is not Factor)
    )


def _operands(norm, x, residual, gate, scale, *shift) -> tuple | None:
    """What `modulated_norm` takes; None where the norm has to be called, or is another
    formula of this x.
    """
    if _is_compiling() or under_transform():
        return None
    scale = scale.value if type(scale) is Factor else scale
    others = [t for t in (residual, gate) if t is not None]
    if not all(type(t) is torch.Tensor for t in (x, *others, scale, *shift)):
        return None
    parameters = operands_ahead(norm, restricted=True)
    if parameters is None:
        return None
    weight, bias, spec = parameters
    recipe = type(norm)._hf_rmsnorm_recipe
    if not _serves(recipe, x, weight, bias, residual):
        return None
    if recipe.row_major and residual is None:
        # as the norm's result is, whatever the strides of x
        x = x.contiguous()
    return x, weight, bias, spec, scale, *(shift or [None]), residual, gate


def _serves(recipe, x, weight, bias, residual) -> bool:
    """Whether the module computes the recipe's formula of x, or of a sum that is
    rounded before.
    """
    if residual is not None and not recipe.rounds_sum:
        return False
    return recipe.fits(x, weight, bias) and recipe.rows_of(x) is x


def _note(piece: str, launched: bool, norm, x, *others) -> None:
    """Tell watchers of a piece, with the reason why no launch computed it."""
    operands = None if launched else _operands(norm, x, *others)
    note(piece, (norm,), x, "" if operands is None else why_apart(*operands))

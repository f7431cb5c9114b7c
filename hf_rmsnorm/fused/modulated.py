"""What a module with an adaptive LayerNorm runs: its norm, the scale and shift behind it, and a gated sum before.

A forward calls these functions once it was compiled again from its own source, by `patching.layers.sums`.
"""

from typing import NamedTuple

import torch

from ..ops.direct import under_transform
from ..ops.modulated import modulated_norm
from .layer import operands_ahead
from .watch import MODULATED_SUM, MODULATION, note, watchers

_is_compiling = torch.compiler.is_compiling


class Product(NamedTuple):
    """``left * right``, one side of a sum, which is computed with the sum."""

    left: torch.Tensor
    right: torch.Tensor


def modulated(x, norm, scale, *shift):
    """``norm(x) * (1 + scale) + shift``, in one launch where that gives the same bits.

    Args:
        x, scale, shift: whatever the forward computes with; no shift where it adds nothing.
    """
    both = _in_one_launch(norm, x, None, None, scale, *shift)
    if watchers:
        note(MODULATION, (norm,), x)
    if both is not None:
        return both[1]
    y = norm(x) * (1 + scale)
    return y + shift[0] if shift else y


def add_and_modulate(left, right, norm, scale, *shift) -> tuple:
    """(``left + right``, ``norm(left + right) * (1 + scale) + shift``), in one launch where that gives the same bits.

    Args:
        left, right: summands; at most one is a `Product`.
    """
    x, residual, gate = _parts(left, right)
    both = None if residual is None else _in_one_launch(norm, x, residual, gate, scale, *shift)
    if watchers:
        note(MODULATED_SUM, (norm,), x)
    if both is not None:
        return both
    total = _computed(left) + _computed(right)
    return total, modulated(total, norm, scale, *shift)


def add_and_modulate_seen(left, right, norm, scale, *shift) -> tuple:
    """`add_and_modulate` of a sum that something else gets hold of: one by one where gradients are asked for.

    In one launch the gradient of the sum, as a hook on it sees it, would lack what comes by the norm.
    """
    if not torch.is_grad_enabled():
        return add_and_modulate(left, right, norm, scale, *shift)
    total = _computed(left) + _computed(right)
    return total, modulated(total, norm, scale, *shift)


def modulated_sum(left, right, norm, scale, *shift):
    """``norm(left + right) * (1 + scale) + shift``."""
    return add_and_modulate(left, right, norm, scale, *shift)[1]


def _computed(summand):
    return summand.left * summand.right if type(summand) is Product else summand


def _parts(left, right) -> tuple:
    """(x, residual, gate of x or None) of a sum; residual is None where it is no sum of plain tensors."""
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
    if _is_compiling() or under_transform():
        return None
    summands = [t for t in (x, residual, gate) if t is not None]
    if not all(type(t) is torch.Tensor for t in (*summands, scale, *shift)):
        return None
    parameters = operands_ahead(norm, restricted=True)
    if parameters is None:
        return None
    weight, bias, spec = parameters
    recipe = type(norm)._hf_rmsnorm_recipe
    if not recipe.fits(x, weight, bias) or recipe.rows_of(x) is not x:
        return None
    if residual is not None and not _may_add(recipe, summands):
        return None
    return modulated_norm(x, weight, bias, spec, scale, *(shift or [None]), residual, gate)


def _may_add(recipe, summands: list[torch.Tensor]) -> bool:
    """Whether the sum may be computed with the norm: it is rounded, and asks for gradients where its summands do."""
    if not recipe.rounds_sum:
        return False
    return not torch.is_grad_enabled() or any(t.requires_grad for t in summands)

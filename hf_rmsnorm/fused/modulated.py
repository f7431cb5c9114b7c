"""The norm of an adaptive LayerNorm with the scale and shift behind it, and a gated sum
before it.

A forward calls these functions once it was compiled again from its own source, by
`patching.layers.sums`. They call `ops.norm.modulated_norm`.
"""

from typing import NamedTuple

from torch import Tensor, is_grad_enabled

from ..operands import ALONE, ONE_PLUS, of_modulation, present
from ..ops.norm import modulated_norm, why_apart
from ..ops.plain import one_by_one
from .layer import operands_ahead
from .watch import MODULATED_SUM, MODULATION, note, watchers


class OnePlusScale(NamedTuple):
    """In the place of a scale: ``1 + scale``, which the forward has computed before."""

    value: Tensor


def modulated(x, norm, scale, shift=None):
    """``norm(x) * (1 + scale) + shift``, in one launch where that gives the same bits.

    Args:
        x, shift: whatever the forward computes with; no shift where it adds nothing.
        scale: the same, or a `OnePlusScale`.
    """
    both = _launched_modulation(MODULATION, norm, x, scale, shift)
    if both is not None:
        return both[1]
    one_plus = scale.value if type(scale) is OnePlusScale else 1 + scale
    y = norm(x) * one_plus
    if shift is None:
        return y
    return y + shift


def add_and_modulate(
    residual, x, multiplier, norm, scale, shift=None, shared=False
) -> tuple:
    """(``residual + x * multiplier``, ``norm(that) * (1 + scale) + shift``), in one
    launch where that gives the same bits.

    Args:
        multiplier: None where the forward adds no product.
        shared: as of `sums.add_and_norm`.
    """
    if not (shared and is_grad_enabled()):
        operands = x, scale, shift, multiplier, residual
        if type(x) is type(multiplier) is Tensor and _size(multiplier) > _size(x):
            operands = multiplier, scale, shift, x, residual
        both = _launched_modulation(MODULATED_SUM, norm, *operands)
        if both is not None:
            return both
    if multiplier is not None:
        x = x * multiplier
    h = residual + x
    return h, modulated(h, norm, scale, shift)


def _size(t: Tensor) -> tuple:
    """A sort key. The multiplier is the lesser factor of a product: it has fewer
    elements, or it is a part of a larger tensor.
    """
    return t.numel(), t.is_contiguous()


def _launched_modulation(
    piece: str, norm, x, scale, shift, multiplier=None, residual=None
) -> tuple | None:
    """(sum or None, result); None where no single launch gives them with the same bits.
    Watchers hear of it.
    """
    modulation = ONE_PLUS
    if type(scale) is OnePlusScale:
        modulation = ALONE
        scale = scale.value
    both = None
    call = _call_of(norm, x, scale, shift, multiplier, residual)
    if call is not None:
        spec, operands, patch = call
        replaced = one_by_one, modulation, operands, patch.unfused, norm
        both = modulated_norm(spec, operands, modulation, replaced)
    if watchers:
        reason = ""
        if call is not None and both is None:
            reason = why_apart(spec, operands)
        note(piece, (norm,), x, both is not None, reason)
    return both


def _call_of(norm, x, scale, shift, multiplier, residual) -> tuple | None:
    """The formula and the operands that `modulated_norm` takes, and the norm's patch;
    None where the norm has to be called, or is another formula of this x.
    """
    for t in (x, scale, *present(shift, multiplier, residual)):
        if type(t) is not Tensor:
            return None
    ahead = operands_ahead(norm)
    if ahead is None:
        return None
    patch, launches, weight, bias = ahead
    recipe = patch.recipe
    if not recipe.fits(x, weight, bias):
        return None
    if recipe.row_major and residual is None:
        # as the norm's result is, whatever the strides of x
        x = x.contiguous()
    operands = of_modulation(x, weight, bias, scale, shift, multiplier, residual)
    return launches.spec, operands, patch

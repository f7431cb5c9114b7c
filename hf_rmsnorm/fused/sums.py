"""Functions that replace a residual sum, and the norm that reads it: one launch if that
gives the same bits.

A forward calls these functions once it was compiled again from its own source, by
`patching.layers.sums`. They call `ops.norm.run_norm`.
"""

from torch import Tensor, is_grad_enabled
from torch.nn import Module

from ..operands import of_sum
from ..ops.norm import run_norm
from .layer import operands_ahead
from .norm import NormPatch
from .watch import SUM, note, watchers


def add_and_norm(residual, x, norm, shared: bool = False):
    """(``residual + x``, ``norm(residual + x)``).

    Args:
        shared: something else gets hold of the sum. Then they are computed one by one
            where gradients are asked for: in one launch a hook on the sum would see a
            gradient without the part that comes through the norm.
    """
    apart = shared and is_grad_enabled()
    both = None if apart else _launch_sum(residual, x, norm)
    if watchers:
        note(SUM, (norm,), x, both is not None, _why_apart(residual, x, apart))
    if both is not None:
        return both
    h = residual + x
    return h, norm(h)


def norm_of_sum(norm, residual, x):
    """``norm(residual + x)``: the norm is looked up before the summands are computed."""
    return add_and_norm(residual, x, norm)[1]


def _why_apart(residual, x, apart: bool) -> str:
    """Why a sum is not one launch with its norm, where that does not follow from the
    norm; "" if it does.
    """
    if apart:
        return "something else reads the sum, and gradients are on"
    for summand in (residual, x):
        if type(summand) is not Tensor:
            return f"a summand of type {type(summand).__name__}"
    if residual.shape != x.shape:
        shapes = f"{tuple(residual.shape)} and {tuple(x.shape)}"
        return f"the summands have the shapes {shapes}"
    return ""


def _launch_sum(residual, x, norm) -> tuple | None:
    """(sum, norm of it); None where these are to be computed one after the other."""
    if type(residual) is not Tensor or type(x) is not Tensor:
        return None
    ahead = operands_ahead(norm)
    if ahead is None:
        return None
    patch, launches, weight, bias = ahead
    if not patch.is_plain:
        return None
    operands = of_sum(residual, x, weight, bias)
    return run_norm(launches, operands, (_unfused, residual, x, patch, norm))


def _unfused(residual: Tensor, x: Tensor, patch: NormPatch, norm: Module) -> tuple:
    """What the launch replaces."""
    h = residual + x
    return h, patch.unfused(norm, h)

"""Functions that replace a residual sum, and the norm that reads it: one launch if that
gives the same bits.

A forward calls these functions once it was compiled again from its own source, by
`patching.layers.sums`. They call `ops.norm.run_norm`.
"""

from torch import Tensor, is_grad_enabled

from ..operands import of_sum
from ..ops.norm import run_norm
from ..ops.plain import one_by_one
from .layer import operands_ahead
from .watch import SUM, note, watchers


def add_and_norm(left, right, norm, shared: bool = False):
    """(``left + right``, ``norm(left + right)``).

    Args:
        shared: something else gets hold of the sum. Then they are computed one by one
            where gradients are asked for: in one launch a hook on the sum would see a
            gradient without the part that comes through the norm.
    """
    apart = shared and is_grad_enabled()
    both = None if apart else _launch_sum(left, right, norm)
    if watchers:
        is_fused = both is not None
        note(SUM, (norm,), right, is_fused, _why_apart(left, right, apart))
    if both is not None:
        return both
    total = left + right
    return total, norm(total)


def norm_of_sum(norm, left, right):
    """``norm(left + right)``: the norm is looked up before the summands are computed."""
    return add_and_norm(left, right, norm)[1]


def _why_apart(left, right, apart: bool) -> str:
    """Why a sum is not one launch with its norm, where that does not follow from the
    norm; "" if it does.
    """
    if apart:
        return "something else reads the sum, and gradients are on"
    for summand in (left, right):
        if type(summand) is not Tensor:
            return f"a summand of type {type(summand).__name__}"
    if left.shape != right.shape:
        shapes = f"{tuple(left.shape)} and {tuple(right.shape)}"
        return f"the summands have the shapes {shapes}"
    return ""


def _launch_sum(left, right, norm) -> tuple | None:
    """(sum, norm of it); None where these are to be computed one after the other."""
    if type(left) is not Tensor or type(right) is not Tensor:
        return None
    ahead = operands_ahead(norm)
    if ahead is None:
        return None
    patch, launches, weight, bias = ahead
    if not patch.is_plain:
        return None
    operands = of_sum(left, right, weight, bias)
    replaced = one_by_one, launches.modulation, operands, patch.unfused, norm
    return run_norm(launches, operands, replaced)

"""Functions that replace a residual sum, and the norm that reads it: one launch if that
gives the same bits.

A forward calls these functions once it was compiled again from its own source, by
`patching.layers.sums`.
"""

from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling
from torch.nn import Module

from ..formula import HALF_DTYPES
from ..kernels.operands import of_sum
from ..ops.backend import under_transform
from ..ops.norm import run
from .layer import operands_ahead
from .norm import recipe_of
from .summands import keep_summands
from .watch import SUM, note, watchers


def add_and_norm(left, right, norm, shared: bool = False):
    """(``left + right``, ``norm(left + right)``).

    Args:
        shared: something else gets hold of the sum. Then they are computed one by one
            where gradients are asked for: in one launch a hook on the sum would see a
            gradient without the part that comes through the norm.
    """
    apart = shared and is_grad_enabled()
    both = None if apart else _launched_sum(left, right, norm)
    if watchers:
        note(SUM, (norm,), right, _why_apart(left, right, apart))
    if both is not None:
        return both
    recipe = recipe_of(norm)
    if recipe is not None and not recipe.rounds_sum:
        total = add_unrounded(left, right, norm, returned=False)
    else:
        total = left + right
    return total, norm(total)


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


def add_unrounded(left, right, module: Module, returned: bool = True):
    """``left + right``, whose summands are kept for a norm that reads the sum before it
    is rounded.

    Args:
        module: which adds, or reads the sum.
        returned: a module returns the sum, so that a checkpoint may run what reads it
            again.

    Raises:
        RuntimeError: the sum is one of a graph that is compiled, exported or
            transformed, or of other tensors.
    """
    total = left + right
    plain = type(left) is type(right) is type(total) is Tensor
    if plain and not (is_compiling() or under_transform()):
        again = module.training or is_grad_enabled()
        keep_summands(total, left, right, returned, again)
    elif getattr(total, "dtype", None) in HALF_DTYPES:
        raise RuntimeError(
            "numerics='vllm' and 'sglang' read residual sums before they are rounded, which torch.compile, "
            "torch.export, functorch and tensors of other types do not allow: run the model without them"
        )
    return total


def _launched_sum(left, right, norm) -> tuple | None:
    """(sum, norm of it); None where these are to be computed one after the other."""
    if type(left) is not Tensor or type(right) is not Tensor:
        return None
    ahead = operands_ahead(norm)
    if ahead is None:
        return None
    patched, launches, weight, bias = ahead
    if not patched.recipe.rounds_sum:
        return None
    return run(launches, of_sum(left, right, weight, bias))

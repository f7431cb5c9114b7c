"""Functions that replace a residual sum and the norm that reads it: one launch if that
gives the same bits.

A forward calls these functions once it was compiled again from its own source, by
`patching.layers.sums`.
"""

import torch

from ..formula import HALF_DTYPES
from ..ops.direct import under_transform
from ..ops.norm import run
from .layer import operands_ahead
from .norm import launches_for
from .recipe import Recipe
from .summands import keep_summands
from .watch import SUM, note, watchers

_is_compiling = torch.compiler.is_compiling


def add_and_norm(left, right, norm):
    """(``left + right``, ``norm(left + right)``)."""
    both = _in_one_launch(left, right, norm)
    if watchers:
        note(SUM, (norm,), right)
    return _one_by_one(left, right, norm) if both is None else both


def add_and_norm_of_seen(left, right, norm):
    """`add_and_norm` of a sum that something else gets hold of: one by one where
    gradients are asked for.

    In one launch a hook on the sum would see a gradient without the part that comes
    through the norm.
    """
    if not torch.is_grad_enabled():
        return add_and_norm(left, right, norm)
    if watchers:
        note(SUM, (norm,), right, "something else reads the sum, and gradients are on")
    return _one_by_one(left, right, norm)


def norm_of_sum(left, right, norm):
    """``norm(left + right)``."""
    return add_and_norm(left, right, norm)[1]


def add_unrounded(left, right, module: torch.nn.Module, returned: bool = True):
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
    plain = type(left) is type(right) is type(total) is torch.Tensor
    if plain and not (_is_compiling() or under_transform()):
        again = module.training or torch.is_grad_enabled()
        keep_summands(total, left, right, returned, again)
    elif getattr(total, "dtype", None) in HALF_DTYPES:
        raise RuntimeError(
            "numerics='vllm' and 'sglang' read residual sums before they are rounded, which torch.compile, "
            "torch.export, functorch and tensors of other types do not allow: run the model without them"
        )
    return total


def _one_by_one(left, right, norm) -> tuple:
    recipe = getattr(type(norm), "_hf_rmsnorm_recipe", None)
    rounds = recipe is None or recipe.rounds_sum
    total = left + right if rounds else add_unrounded(left, right, norm, returned=False)
    return total, norm(total)


def _in_one_launch(left, right, norm) -> tuple | None:
    """(sum, norm of it); None where these are to be computed one after the other."""
    if (
        _is_compiling()
        or type(left) is not torch.Tensor
        or type(right) is not torch.Tensor
    ):
        return None
    parameters = operands_ahead(norm)
    if parameters is None:
        return None
    weight, bias, spec = parameters
    recipe: Recipe = type(norm)._hf_rmsnorm_recipe
    if not recipe.rounds_sum:
        return None
    return run(
        launches_for(norm, spec), right, weight, bias, None, left, recipe.keeps_output
    )

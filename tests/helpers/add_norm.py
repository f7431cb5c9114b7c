"""A residual sum and the norm of it, as fused layers compute them."""

import torch
from computed import compute_norm

from hf_rmsnorm.operands import of_sum
from hf_rmsnorm.ops.launches import launches_of
from hf_rmsnorm.ops.norm import run_norm


def fused_add_norm(x, residual, weight, bias, spec):
    """(``residual + x``, the norm of it): in one launch, or one after the other."""
    if not torch.compiler.is_compiling():
        both = run_norm(launches_of(spec), of_sum(residual, x, weight, bias))
        if both is not None:
            return both
    total = residual + x
    return total, compute_norm(total, weight, bias, spec)

"""How DTensors pass through the operators: rows may be split over the first dimension, the hidden size may not.

Imported when the first DTensor arrives, so that nobody else pays for `torch.distributed.tensor`.
"""

from __future__ import annotations

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from .operators import norm_backward_op, norm_forward_op


def _replicated(tensor):
    return None if tensor is None else Replicate()


def _splits_rows(x) -> bool:
    return x.ndim > 1


@register_sharding(norm_forward_op)
def forward_sharding(x, weight, bias, *formula):
    """(y, rstd, mean) of rows split like x's; rstd and mean are flat over rows, so only dimension 0 maps onto them."""
    plain = [None] * len(formula)
    parameters = [_replicated(weight), _replicated(bias)]
    acceptable = [([Replicate()] * 3, [Replicate(), *parameters, *plain])]
    if _splits_rows(x):
        acceptable.append(([Shard(0)] * 3, [Shard(0), *parameters, *plain]))
    return acceptable


@register_sharding(norm_backward_op)
def backward_sharding(dy, x, weight, bias, rstd, mean, *formula):
    """dx like x; a parameter's gradient is a partial sum over the rows of each rank."""
    plain = [None] * len(formula)
    parameters = [_replicated(weight), _replicated(bias)]
    whole = [Replicate(), Replicate(), *parameters, Replicate(), Replicate()]
    acceptable = [([Replicate()] * 3, [*whole, *plain])]
    if _splits_rows(x):
        rows = [Shard(0), Shard(0), *parameters, Shard(0), Shard(0)]
        acceptable.append(([Shard(0), Partial(), Partial()], [*rows, *plain]))
    return acceptable

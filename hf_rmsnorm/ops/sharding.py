"""How DTensors pass through the operators: rows may be split over the first dimension, the hidden size may not.

Imported when the first DTensor arrives, so that nobody else pays for `torch.distributed.tensor`.
"""

from __future__ import annotations

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from .operators import norm_backward_op, norm_forward_op


def _replicated(tensor):
    return None if tensor is None else Replicate()


def _splits_rows(x, *parameters) -> bool:
    return x.ndim > max((p.ndim for p in parameters if p is not None), default=1)


@register_sharding(norm_forward_op)
def forward_sharding(x, weight, bias, gate, *formula):
    """(y, rstd, mean) of rows split like x's; rstd and mean are flat over rows, so only dimension 0 maps onto them."""
    rest = [None] * len(formula)

    def inputs(rows):
        return [rows, _replicated(weight), _replicated(bias), None if gate is None else rows, *rest]

    acceptable = [([Replicate()] * 3, inputs(Replicate()))]
    if _splits_rows(x, weight, bias):
        acceptable.append(([Shard(0)] * 3, inputs(Shard(0))))
    return acceptable


@register_sharding(norm_backward_op)
def backward_sharding(dy, x, weight, bias, gate, dh, rstd, mean, *formula):
    """dx and dgate like x; a parameter's gradient is a partial sum over the rows of each rank."""
    rest = [None] * len(formula)

    def inputs(rows):
        parameters = [_replicated(weight), _replicated(bias)]
        optional = [None if t is None else rows for t in (gate, dh)]
        return [rows, rows, *parameters, *optional, rows, rows, *rest]

    acceptable = [([Replicate()] * 4, inputs(Replicate()))]
    if _splits_rows(x, weight, bias):
        acceptable.append(([Shard(0), Partial(), Partial(), Shard(0)], inputs(Shard(0))))
    return acceptable

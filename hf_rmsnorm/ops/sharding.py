"""How DTensors pass through the operators: whatever does not split the dimension that
is normalised stays split.

Each rule lists, for one dimension of the mesh, placements of the outputs with those of
the operands: everything replicated, or the rows split over one of their dimensions.
Parameters are replicated and their gradients are then partial sums; where each head has
a row of them, heads may be split, and the parameters and their gradients with them. A
split hidden size is not among these, so DTensor gathers it.

`operators` imports this when the first DTensor arrives: other programs do not load
`torch.distributed.tensor`. The operators are looked up by their registered names.
"""

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from ..operands import present

_operators = torch.ops.hf_rmsnorm


def _ways(x, *parameters) -> list[tuple]:
    """(placement of the rows, of the parameters, of the parameters' gradients), for
    each way to place rows.
    """
    whole = Replicate()
    dimensions = {p.ndim for p in present(*parameters)}
    per_head = 2 in dimensions
    of_rows = x.ndim - 1
    if per_head:
        of_rows -= 1
    ways = [(whole, whole, whole)]
    for dimension in range(of_rows):
        ways.append((Shard(dimension), whole, Partial()))
    if per_head:
        ways.append((Shard(of_rows), Shard(0), Shard(0)))
    return ways


def _if(operand, placement):
    """The placement of an operand that may be absent."""
    if operand is None:
        return None
    return placement


def _made(wanted, placement):
    """The placement of an output; one that is not wanted is an empty tensor."""
    if wanted:
        return placement
    return Replicate()


@register_sharding(_operators.norm_forward.default)
def norm_forward(x, weight, bias, gate, centered, *others):
    *_, stats = others
    no_placements = [None] * (1 + len(others))
    strategies = []
    for rows, of_parameters, _ in _ways(x, weight, bias):
        outputs = [
            rows,
            _made(stats, rows),
            _made(stats and centered, rows),
        ]
        inputs = [
            rows,
            _if(weight, of_parameters),
            _if(bias, of_parameters),
            _if(gate, rows),
        ]
        strategies.append((outputs, inputs + no_placements))
    return strategies


@register_sharding(_operators.norm_backward.default)
def norm_backward(dy, x, weight, bias, gate, *others):
    _, _, centered, *_, need = others
    need_x, need_weight, need_bias, need_gate = need
    no_placements = [None] * (len(others) - 2)
    strategies = []
    for rows, of_parameters, sums in _ways(x, weight, bias):
        outputs = [
            _made(need_x, rows),
            _made(need_weight, sums),
            _made(need_bias, sums),
            _made(need_gate, rows),
        ]
        inputs = [
            rows,
            rows,
            _if(weight, of_parameters),
            _if(bias, of_parameters),
            _if(gate, rows),
            rows,
            _made(centered, rows),
        ]
        strategies.append((outputs, inputs + no_placements))
    return strategies

"""How DTensors pass through the operators: whatever does not split the dimension that
is normalised stays split.

Each rule lists, for one dimension of the mesh, placements of the outputs with those of
the operands: everything replicated, or the rows split over one of their dimensions.
Parameters are replicated and their gradients are then partial sums; where each head has
a row of them, heads may be split, and the parameters and their gradients with them. A
split hidden size is not among these, so DTensor gathers it.

`loading` imports this when the first DTensor arrives: other programs do not load
`torch.distributed.tensor`. The operators are looked up by their registered names.
"""

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

_operators = torch.ops.hf_rmsnorm


def _ways(x, *parameters) -> list[tuple]:
    """(placement of the rows, of the parameters, of the parameters' gradients), for
    each way to place rows.
    """
    per_head = any(p is not None and p.ndim == 2 for p in parameters)
    dimensions = x.ndim - 1 - per_head
    whole = Replicate()
    ways = [(Shard(d), whole, Partial()) for d in range(dimensions)]
    if per_head:
        ways.append((Shard(dimensions), Shard(0), Shard(0)))
    return [(whole, whole, whole), *ways]


def _if(operand, placement):
    """The placement of an operand that may be absent."""
    return None if operand is None else placement


def _made(wanted, placement):
    """The placement of an output; one that is not wanted is an empty tensor."""
    return placement if wanted else Replicate()


@register_sharding(_operators.norm_forward.default)
def norm_forward(*arguments):
    (x, weight, bias, gate), rest = arguments[:4], arguments[4:]
    centered, *_, stats = rest
    strategies = []
    for rows, parameters, _ in _ways(x, weight, bias):
        of_parameters = [_if(weight, parameters), _if(bias, parameters)]
        inputs = [rows, *of_parameters, _if(gate, rows)] + [None] * len(rest)
        outputs = [rows, _made(stats, rows), _made(stats and centered, rows)]
        strategies.append((outputs, inputs))
    return strategies


@register_sharding(_operators.norm_backward.default)
def norm_backward(*arguments):
    (_, x, weight, bias, gate, dh, *_), rest = arguments[:8], arguments[8:]
    centered, *_, need = rest
    strategies = []
    for rows, parameters, sums in _ways(x, weight, bias):
        of_parameters = [_if(weight, parameters), _if(bias, parameters)]
        others = [_if(gate, rows), _if(dh, rows), rows, _made(centered, rows)]
        inputs = [rows, rows, *of_parameters, *others] + [None] * len(rest)
        made = zip(need, (rows, sums, sums, rows), strict=True)
        strategies.append(([_made(*pair) for pair in made], inputs))
    return strategies

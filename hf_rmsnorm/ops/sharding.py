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


def _splits(x, *parameters) -> list[tuple]:
    """(placement of the rows, of the parameters, of the parameters' gradients), for
    each way to split rows.
    """
    per_head = any(p is not None and p.ndim == 2 for p in parameters)
    rows = x.ndim - 1 - per_head
    found = [(Shard(d), Replicate(), Partial()) for d in range(rows)]
    return found + [(Shard(rows), Shard(0), Shard(0))] if per_head else found


def _if(given, placement):
    """The placement of an operand that may be absent."""
    return None if given is None else placement


def _made(wanted, placement):
    """The placement of an output; one that is not wanted is an empty tensor."""
    return placement if wanted else Replicate()


_WHOLE = (Replicate(), Replicate(), Replicate())


@register_sharding(_operators.norm_forward.default)
def norm_forward(x, weight, bias, gate, eps, centered, *formula):
    rest, stats = [None] * (2 + len(formula)), formula[-1]
    return [
        (
            [rows, _made(stats, rows), _made(stats and centered, rows)],
            [
                rows,
                _if(weight, parameters),
                _if(bias, parameters),
                _if(gate, rows),
                *rest,
            ],
        )
        for rows, parameters, _ in [_WHOLE, *_splits(x, weight, bias)]
    ]


@register_sharding(_operators.norm_backward.default)
def norm_backward(dy, x, weight, bias, gate, dh, rstd, mean, eps, centered, *formula):
    rest, need = [None] * (2 + len(formula)), formula[-1]
    return [
        (
            [_made(n, p) for n, p in zip(need, (rows, gradients, gradients, rows), strict=True)],
            [
                rows, rows, _if(weight, parameters), _if(bias, parameters), _if(gate, rows), _if(dh, rows),
                rows, _made(centered, rows), *rest,
            ],
        )
        for rows, parameters, gradients in [_WHOLE, *_splits(x, weight, bias)]
    ]  # fmt: skip

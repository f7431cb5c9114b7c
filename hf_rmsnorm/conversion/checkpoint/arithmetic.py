"""Centring and scaling of one tensor in float64, in pieces of bounded size, rounded once."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import numpy as np
import torch

from .recipe import Recipe, centred_blocks
from .source import FLOATS, Read, StoredTensor

CHUNK = 1 << 20
"""Elements that are in float64 at a time: 8 MiB."""


def changed_bytes(
    read: Read, tensor: StoredTensor, recipe: Recipe, factors: dict[str, torch.Tensor]
) -> Iterator[memoryview]:
    """Yield the bytes that a tensor becomes, piece by piece in the order of storage.

    Args:
        read: reads bytes of the shard.
        tensor: of a dtype in `FLOATS`.
        recipe: what is done to it.
        factors: float64 values of the tensors that it is multiplied by.
    """
    dtype = FLOATS[tensor.dtype]
    work = torch.empty(min(CHUNK, prod(tensor.shape)), dtype=torch.float64)

    def load(first: int, count: int) -> torch.Tensor:
        raw = read(tensor, first * dtype.itemsize, (first + count) * dtype.itemsize)
        x = work[:count].copy_(torch.frombuffer(raw, dtype=dtype))
        for scale in recipe.scale:
            inner = prod(tensor.shape[scale.axis + 1 :])
            x *= factors[scale.by][torch.arange(first, first + count) // inner % tensor.shape[scale.axis]]
        return x

    size = prod(tensor.shape)
    if recipe.centre:
        axis = recipe.centre[0].axis
        length, inner = tensor.shape[axis], prod(tensor.shape[axis + 1 :])
        if length * inner > CHUNK:
            yield from _two_passes(load, size, length, inner, recipe, dtype)
            return
    else:
        length = inner = 1
    # A slab is the whole axis: a piece of whole slabs holds the blocks whole.
    step = CHUNK // max(1, length * inner) * length * inner
    for first in range(0, size, step or 1):
        x = load(first, min(step, size - first))
        for centre in recipe.centre:
            blocks = x.view(-1, length // centre.block, centre.block, inner)
            if centre.blocks is None:
                blocks -= blocks.mean(2, keepdim=True)
            else:
                chosen = list(centre.blocks)
                blocks[:, chosen] -= blocks[:, chosen].mean(2, keepdim=True)
        yield as_bytes(torch.ones_like(x) if recipe.ones else x, dtype)


def _two_passes(load, size, length, inner, recipe, dtype) -> Iterator[memoryview]:
    """A slab larger than a piece is read twice: for the means of its blocks, and to subtract them."""
    block_of_row = torch.full((length,), -1)
    lengths = []
    for centre in recipe.centre:
        for index in centred_blocks(centre, length):
            block_of_row[index * centre.block : (index + 1) * centre.block] = len(lengths)
            lengths.append(centre.block)
    block_of_row[block_of_row < 0] = len(lengths)  # rows outside of every block: their mean counts as 0
    lengths = torch.tensor([*lengths, 1], dtype=torch.float64)[:, None]
    rows, columns = max(1, CHUNK // inner), min(inner, CHUNK)
    for slab in range(0, size, length * inner):
        pieces = [
            (slice(row, min(row + rows, length)), slice(column, min(column + columns, inner)))
            for row in range(0, length, rows)
            for column in range(0, inner, columns)
        ]

        def at(piece, slab=slab):
            row, column = piece
            shape = (row.stop - row.start, column.stop - column.start)
            return load(slab + row.start * inner + column.start, shape[0] * shape[1]).view(shape)

        means = torch.zeros(len(lengths), inner, dtype=torch.float64)
        for row, column in pieces:
            x, blocks = at((row, column)), block_of_row[row]
            if (blocks == blocks[0]).all():  # nearly always, and faster
                means[blocks[0], column] += x.sum(0)
            else:
                means[:, column].index_add_(0, blocks, x)
        means /= lengths
        means[-1] = 0
        for row, column in pieces:
            x, blocks = at((row, column)), block_of_row[row]
            x -= means[blocks[0] if (blocks == blocks[0]).all() else blocks, column]
            yield as_bytes(x.view(-1), dtype)


def as_bytes(x: torch.Tensor, dtype: torch.dtype) -> memoryview:
    """Round float64 values of shape (n,) to the nearest of a dtype, ties to even, and give their bytes.

    PyTorch casts float64 to bfloat16 and float16 by way of float32: two roundings, of which the first can make the tie
    that the second then breaks the wrong way.
    """
    if dtype == torch.float16:
        y = torch.from_numpy(x.numpy().astype(np.float16))  # NumPy rounds once
    elif dtype == torch.bfloat16:
        single = x.float()
        bits = single.view(torch.int32).numpy()
        # Where the half that bfloat16 drops is a tie; NumPy finds them in a quarter of the time.
        ties = torch.from_numpy(np.flatnonzero((bits & 0xFFFF) == 0x8000))
        away = single[ties].double() - x[ties]
        # A step to where x is: towards zero where the first rounding went away from it, else away from zero.
        single.view(torch.int32)[ties] -= (away.sign() * x[ties].sign()).int()
        y = single.bfloat16()
    else:
        y = x.to(dtype, copy=True)  # the caller uses x again
    return memoryview(y.view(torch.uint8).numpy())

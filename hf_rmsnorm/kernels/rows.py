"""How the rows of a tensor are addressed, so that strided views (q and k inside a packed projection) need no copy."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch


class RowAddress(NamedTuple):
    """Row r starts at (r // length) * outer + (r % length) * inner elements."""

    length: int
    outer: int
    inner: int


@lru_cache(maxsize=4096)
def memory_order(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """The leading dimensions from the slowest to the fastest, or None where that is their own order."""
    leading = range(len(shape) - 1)
    order = tuple(sorted(leading, key=lambda d: -strides[d] if shape[d] > 1 else 0))
    if strides[-1] != 1 and shape[-1] != 1:
        return None  # such rows are copied, and a copy has its own order
    real = [d for d in order if shape[d] > 1]
    return None if real == sorted(real) else order


@lru_cache(maxsize=4096)
def row_address(
    shape: tuple[int, ...], strides: tuple[int, ...], order: tuple[int, ...] | None
) -> RowAddress | None:
    """Address of the rows taken in `order` (None: their own), or None where two levels do not reach them."""
    if strides[-1] != 1 and shape[-1] != 1:
        return None
    levels: list[tuple[int, int]] = []
    for d in order or range(len(shape) - 1):
        size, stride = shape[d], strides[d]
        if size == 1:
            continue
        if levels and levels[-1][1] == size * stride:
            levels[-1] = (levels[-1][0] * size, stride)
        else:
            levels.append((size, stride))
    if len(levels) > 2:
        return None
    if not levels:
        return RowAddress(1, 0, 0)
    size, stride = levels[-1]
    return RowAddress(size, levels[0][1] if len(levels) == 2 else 0, stride)


def addressable_rows(t: torch.Tensor, order: tuple[int, ...] | None) -> tuple[torch.Tensor, RowAddress]:
    """t, or a copy where its rows cannot be addressed in place, with the address of its rows taken in `order`."""
    if order is None and t.is_contiguous():
        hidden_size = t.shape[-1]
        return t, RowAddress(max(1, t.numel() // hidden_size), 0, hidden_size)
    address = row_address(tuple(t.shape), t.stride(), order)
    if address is None:
        t = (t if order is None else t.permute(*order, -1)).contiguous()
        address = RowAddress(max(1, t.numel() // t.shape[-1]), 0, t.shape[-1])
    return t, address


def flat_in_order(t: torch.Tensor, order: tuple[int, ...] | None) -> bool:
    """Whether the rows of t, taken in `order`, lie one behind the other without gaps."""
    if order is None:
        return t.is_contiguous()
    return t.permute(*order, -1).is_contiguous()

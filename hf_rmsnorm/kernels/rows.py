"""How the rows of a tensor are addressed, so that strided views (q and k inside a packed projection) need no copy."""

from __future__ import annotations

from typing import NamedTuple


class RowAddress(NamedTuple):
    """Row r starts at (r // length) * outer + (r % length) * inner elements."""

    length: int
    outer: int
    inner: int


def memory_order(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """The leading dimensions from the slowest to the fastest, or None where that is their own order."""
    leading = range(len(shape) - 1)
    order = tuple(sorted(leading, key=lambda d: -strides[d] if shape[d] > 1 else 0))
    if strides[-1] != 1 and shape[-1] != 1:
        return None  # such rows are copied, and a copy has its own order
    real = [d for d in order if shape[d] > 1]
    return None if real == sorted(real) else order


def row_address(shape: tuple[int, ...], strides: tuple[int, ...], order: tuple[int, ...] | None) -> RowAddress | None:
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


def flat_strides(shape: tuple[int, ...], strides: tuple[int, ...], order: tuple[int, ...] | None) -> bool:
    """Whether rows taken in `order` (None: their own) lie one behind the other without gaps."""
    expected = shape[-1]
    if strides[-1] != 1 and shape[-1] != 1:
        return False
    for d in reversed(order or range(len(shape) - 1)):
        if shape[d] != 1 and strides[d] != expected:
            return False
        expected *= shape[d]
    return True

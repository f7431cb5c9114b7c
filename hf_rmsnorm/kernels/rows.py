"""How the rows of a tensor are addressed, so that strided views (q and k inside a packed projection) need no copy."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ..formula import NormSpec


class RowAddress(NamedTuple):
    """Row r starts at (r // length) * outer + (r % length) * inner elements: in place, or in a `copy` made first."""

    length: int = 1
    outer: int = 0
    inner: int = 0
    copy: bool = False

    @classmethod
    def of(cls, t: torch.Tensor | None, order: tuple[int, ...] | None) -> RowAddress:
        """Where the kernels read the rows of t, taken in `order`; no row where there is no t."""
        if t is None:
            return cls()
        found = row_address(t.shape, t.stride(), order)
        return found or cls(max(1, math.prod(t.shape[:-1])), 0, t.shape[-1], copy=True)

    def flat(self, rows: int, hidden_size: int) -> bool:
        """Whether the rows lie one behind the other; also where there is but one row, or no tensor."""
        return self == RowAddress() or self[:3] == (rows, 0, hidden_size)

    def arguments(self, name: str) -> dict[str, int]:
        """The address as the kernels' parameters."""
        return {f"{name}_len": self.length, f"{name}_outer": self.outer, f"{name}_inner": self.inner}


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
        return RowAddress()
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


def row_order(x: torch.Tensor, spec: NormSpec, heads: int) -> tuple[int, ...] | None:
    """The leading dimensions of x in the order in which the kernels number its rows, or None where that is their own.

    Rows keep their own where the output is row-major, and where each head has a weight of its own: the kernel tells the
    head by the row's number.
    """
    if spec.functional or heads > 1 or x.is_contiguous():
        return None
    return memory_order(tuple(x.shape), x.stride())


def heads_of(*parameters: torch.Tensor | None) -> int:
    """How many rows of parameters there are: each row of x takes the next."""
    return next((p.shape[0] for p in parameters if p is not None and p.dim() == 2), 1)

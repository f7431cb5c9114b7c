"""How the rows of a tensor are addressed, so that strided views (q and k inside a
packed projection) need no copy.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..formula import NormSpec

Shape = tuple[int, ...]


class RowAddress(NamedTuple):
    """Row r starts at (r // length) * outer + (r % length) * inner elements: in place,
    or in a `copy` made first.
    """

    length: int = 1
    outer: int = 0
    inner: int = 0
    copy: bool = False

    @classmethod
    def of(cls, t: torch.Tensor | None, order: Shape | None) -> RowAddress:
        """Where the kernels read the rows of t, taken in `order`; a t of None has no
        rows.
        """
        if t is None:
            return cls()
        address = row_address(t.shape, t.stride(), order)
        if address is not None:
            return address
        rows = math.prod(t.shape[:-1])
        return cls(max(1, rows), 0, t.shape[-1], copy=True)

    def flat(self, rows: int, hidden_size: int) -> bool:
        """Whether no gaps are between the rows; True of one row, and of no tensor."""
        return self == RowAddress() or self[:3] == (rows, 0, hidden_size)

    def arguments(self, name: str) -> dict[str, int]:
        """The address as the kernels' parameters."""
        return {
            f"{name}_len": self.length,
            f"{name}_outer": self.outer,
            f"{name}_inner": self.inner,
        }


def memory_order(shape: Shape, strides: Shape) -> Shape | None:
    """The leading dimensions from the slowest to the fastest, or None if they have that
    order already.
    """
    if strides[-1] != 1 and shape[-1] != 1:
        return None  # such rows are copied, and a copy has its own order

    def slowest_first(d: int) -> int:
        return -strides[d] if shape[d] > 1 else 0

    order = tuple(sorted(range(len(shape) - 1), key=slowest_first))
    real = [d for d in order if shape[d] > 1]
    return None if real == sorted(real) else order


def row_address(shape: Shape, strides: Shape, order: Shape | None) -> RowAddress | None:
    """Address of the rows in `order` (None: that of the dimensions), or None where two
    levels do not reach them.
    """
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


def flat_strides(shape: Shape, strides: Shape, order: Shape | None) -> bool:
    """Whether no gaps are between the rows, taken in `order` (None: that of the
    dimensions).
    """
    expected = shape[-1]
    if strides[-1] != 1 and shape[-1] != 1:
        return False
    for d in reversed(order or range(len(shape) - 1)):
        if shape[d] != 1 and strides[d] != expected:
            return False
        expected *= shape[d]
    return True


def row_order(x: torch.Tensor, spec: NormSpec, heads: int) -> Shape | None:
    """The leading dimensions of x in the order in which the kernels number its rows, or
    None if they have it already.

    It is that of the dimensions if the output is row-major, and if each head has its
    weight: a kernel computes the head from the row's number.
    """
    if spec.functional or heads > 1 or x.is_contiguous():
        return None
    return memory_order(tuple(x.shape), x.stride())


def heads_of(*parameters: torch.Tensor | None) -> int:
    """How many rows of parameters there are: each row of x takes the next."""
    for parameter in parameters:
        if parameter is not None and parameter.dim() == 2:
            return parameter.shape[0]
    return 1


def output_layout(
    x: torch.Tensor, spec: NormSpec, weight: torch.Tensor | None, heads: int
):
    """(order in which rows are numbered, memory format of the output, whether that
    output is flat in this order).
    """
    if spec.functional:
        return None, torch.contiguous_format, True
    order = row_order(x, spec, heads)
    output = without_data(x)
    if heads > 1 and weight is not None:
        # a weight of heads takes part in the order of the product
        with _disable_current_modes():
            product = without_data(weight) * output
        if product.is_contiguous():
            return order, torch.contiguous_format, True
    return (
        order,
        torch.preserve_format,
        flat_strides(tuple(x.shape), output.stride(), order),
    )


def without_data(x: torch.Tensor) -> torch.Tensor:
    """``empty_like(x)`` on the meta device, for its strides."""
    with _disable_current_modes():  # a mode of the caller is not to see the operator
        return torch.empty_like(x, device="meta")


def sum_without_data(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """``residual + x`` on the meta device, for its strides and dtype."""
    with _disable_current_modes():
        left, right = (
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
            for t in (residual, x)
        )
        return left + right


def blank(device: torch.device, *shape: int) -> torch.Tensor:
    """A tensor of float32 in the memory of one element: ``empty_like`` it is the
    quickest way to one of this shape.
    """
    with _disable_current_modes(), torch.inference_mode(False):
        return _element(device).expand(shape)


@cache
def _element(device: torch.device) -> torch.Tensor:
    return torch.empty(1, dtype=torch.float32, device=device)


def in_order(t: torch.Tensor, order: Shape | None) -> torch.Tensor:
    """t with its leading dimensions in this order."""
    return t if order is None else t.permute(*order, -1)


def copied_in_order(t: torch.Tensor | None, order: Shape | None) -> torch.Tensor | None:
    """A copy of t with its rows in this order, without gaps."""
    return None if t is None else in_order(t, order).contiguous()


def flat_like(t: torch.Tensor | None, order: Shape | None) -> torch.Tensor | None:
    """An empty tensor for the rows of t in this order, without gaps."""
    if t is None:
        return None
    shape = in_order(t, order).shape
    return torch.empty(shape, dtype=t.dtype, device=t.device)

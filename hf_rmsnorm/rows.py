"""How the rows of a tensor are addressed, so that strided views (q and k inside a
packed projection) need no copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .formula import NormSpec, OptionalTensor

Shape = tuple[int, ...]


class Addressing(NamedTuple):
    """How a kernel reaches the rows of its tensors.

    Args:
        in_place: it reads and writes all where they lie; else copies of some.
        flat: no gaps are between the rows of any.
        arguments: its parameters, by name.
    """

    in_place: bool
    flat: bool
    arguments: dict[str, int]


class RowAddress(NamedTuple):
    """Row r starts at (r // length) * outer + (r % length) * inner elements."""

    length: int = 1
    outer: int = 0
    inner: int = 0


def addresses(
    order: Shape | None,
    outputs: list[Tensor],
    read: dict[str, OptionalTensor],
) -> Addressing:
    """How a kernel reads these tensors and writes these outputs.

    Args:
        order: in which rows are taken; None is that of the dimensions.
        outputs: meta tensors.
        read: by the names of their parameters. Each has an address; a tensor that two
            levels do not reach is copied.
    """
    *of_rows, size = outputs[0].shape
    one_by_one = RowAddress(math.prod(of_rows), 0, size)
    in_place = all(in_order(t, order).is_contiguous() for t in outputs)
    flat = True
    arguments = {}
    for name, t in read.items():
        address = RowAddress()
        if t is not None:
            address = row_address(t.shape, t.stride(), order)
        if address is None:
            in_place = False
            address = one_by_one
        # one row, or no tensor, has the address RowAddress()
        flat = flat and address in (RowAddress(), one_by_one)
        arguments[f"{name}_len"] = address.length
        arguments[f"{name}_outer"] = address.outer
        arguments[f"{name}_inner"] = address.inner
    return Addressing(in_place, flat, arguments)


def memory_order(shape: Shape, strides: Shape) -> Shape | None:
    """The leading dimensions from the slowest to the fastest, or None if they have that
    order already.
    """
    if strides[-1] != 1 and shape[-1] != 1:
        return None  # such rows are copied, and a copy has its own order
    leading = range(len(shape) - 1)
    single = [d for d in leading if shape[d] == 1]
    others = [d for d in leading if shape[d] != 1]
    slowest_first = sorted(others, key=lambda d: -strides[d])
    if slowest_first == others:
        return None
    return *slowest_first, *single


def row_address(shape: Shape, strides: Shape, order: Shape | None) -> RowAddress | None:
    """Address of the rows in `order` (None: that of the dimensions), or None where two
    levels do not reach them.
    """
    if strides[-1] != 1 and shape[-1] != 1:
        return None
    sizes, steps = [], []  # of the levels, the outermost first
    for d in order or range(len(shape) - 1):
        size = shape[d]
        step = strides[d]
        if size == 1:
            continue
        if steps and steps[-1] == size * step:
            size *= sizes.pop()
            steps.pop()
        sizes.append(size)
        steps.append(step)
    if not steps:
        return RowAddress()
    if len(steps) > 2:
        return None
    *outer, inner = steps
    return RowAddress(sizes[-1], sum(outer), inner)


def row_order(x: Tensor, spec: NormSpec, heads: int) -> Shape | None:
    """The leading dimensions of x in the order in which the kernels number its rows, or
    None if they have it already.

    It is that of the dimensions if the output is row-major, and if each head has its
    weight: a kernel computes the head from the row's number.
    """
    if spec.functional or heads > 1 or x.is_contiguous():
        return None
    return memory_order(tuple(x.shape), x.stride())


def heads_of(*parameters: OptionalTensor) -> int:
    """How many rows of parameters there are: each row of x takes the next."""
    for parameter in parameters:
        if parameter is not None and parameter.dim() == 2:
            return parameter.shape[0]
    return 1


def output_like(
    x: Tensor, spec: NormSpec, weight: OptionalTensor, heads: int, dtype: torch.dtype
) -> Tensor:
    """A meta tensor with the strides of the norm's result, which its gradients have
    too.
    """
    if spec.functional:
        return torch.empty(x.shape, dtype=dtype, device="meta")
    output = without_data(x, dtype)
    if heads > 1 and weight is not None:
        # a weight of heads takes part in the order of the product
        return without_data(weight, dtype) * output
    return output


def without_data(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """``empty_like(x)`` on the meta device, for its strides."""
    return torch.empty_like(x, device="meta", dtype=dtype)


def strided_without_data(t: Tensor) -> Tensor:
    """t on the meta device, with all its strides."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


def allocator(x: Tensor, like: Tensor) -> Callable[[Tensor], Tensor]:
    """``allocate(x)``, which makes an empty tensor with the dtype and strides of `like`
    on x's device.
    """
    dtype = like.dtype
    strides = like.stride()
    if x.dtype == dtype and without_data(x).stride() == strides:
        # Without options, which take as long again as a dictionary look-up.
        return torch.empty_like

    def allocate(x: Tensor) -> Tensor:
        return torch.empty_strided(x.shape, strides, dtype=dtype, device=x.device)

    return allocate


def blank(device: torch.device, *shape: int) -> Tensor:
    """A tensor of float32 without memory: ``empty_like`` it is the quickest way to one
    of this shape.
    """
    t = torch.empty(1, dtype=torch.float32, device=device).expand(shape)
    # A CUDA graph does not let memory of its pool be kept unseen.
    t.untyped_storage().resize_(0)
    return t


def in_order(t: Tensor, order: Shape | None) -> Tensor:
    """t with its leading dimensions in this order."""
    if order is None:
        return t
    return t.permute(*order, -1)


def start_on_copies(
    start: Callable[[tuple], None],
    operands: Sequence[OptionalTensor],
    outputs: Sequence[OptionalTensor],
    shape: Shape,
    order: Shape | None,
) -> None:
    """Start a kernel on copies of the outputs of this shape, and of the operands that
    two levels do not reach: their rows lie one behind the other in `order`. The outputs
    are copied back.
    """
    read = []
    for t in operands:
        is_rows = t is not None and t.shape == shape
        if is_rows and row_address(shape, t.stride(), order) is None:
            t = in_order(t, order).contiguous()
        read.append(t)
    written = []
    for t in outputs:
        if t is not None and t.shape == shape:
            t = in_order(t, order).contiguous()
        written.append(t)
    start((*read, *written))
    for output, copy in zip(outputs, written, strict=True):
        if copy is not output:
            in_order(output, order).copy_(copy)


def by_row(stats: OptionalTensor, x: Tensor, order: Shape | None) -> OptionalTensor:
    """Statistics as kernels number rows in `order`, in the shape of x's rows, if there
    are any.
    """
    if stats is None:
        return None
    if order is None:
        return stats.view(x.shape[:-1])
    result = stats.new_empty(x.shape[:-1])
    ordered = result.permute(order)
    ordered.copy_(stats.view(ordered.shape))
    return result


def as_numbered(stats: Tensor, order: Shape | None) -> Tensor:
    """The inverse of `by_row`; statistics of one dimension are returned unchanged."""
    if stats.dim() > 1 and order is not None:
        stats = stats.permute(order)
    return stats.reshape(-1)

"""The checks of a backward on the tensors that its forward saved.

``weight.data = torch.empty(0)``, as offloading by hand does, changes a saved tensor,
and autograd does not notice. A kernel would read past its end.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch


class Saved(NamedTuple):
    """The name, shape and dtype that a saved tensor has to have; a dtype of None is
    any.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None

    @classmethod
    def of(cls, name: str, t: torch.Tensor | None) -> Saved | None:
        """The same as t has; None of None."""
        return None if t is None else cls(name, tuple(t.shape), t.dtype)


def saved_as(
    named: dict[str, torch.Tensor | None],
    rows: int,
    statistics: tuple[str, ...] = ("rstd",),
) -> tuple:
    """A `Saved` for each of these tensors, or None for None, and for each of the
    statistics behind them.
    """
    operands = [Saved.of(name, t) for name, t in named.items()]
    of_rows = [Saved(name, (rows,), torch.float32) for name in statistics]
    return (*operands, *of_rows)


def require_saved(
    device: torch.device, expected: tuple[Saved | None, ...], tensors: tuple
) -> None:
    """Compare each tensor with its `Saved`; None on either side passes.

    Raises:
        RuntimeError: a tensor has another shape, dtype or device.
    """
    for saved, t in zip(expected, tensors, strict=True):
        if saved is None or t is None:
            continue
        dtype = saved.dtype or t.dtype
        if t.shape == saved.shape and t.dtype == dtype and t.device == device:
            continue
        expects = _words(saved.shape, dtype, device)
        finds = _words(t.shape, t.dtype, t.device)
        raise RuntimeError(
            f"{saved.name} changed between forward and backward: the backward expects {expects}, and finds {finds}; "
            "keep what a forward has read as it is until its backward has run"
        )


def _words(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> str:
    name = str(dtype).removeprefix("torch.")
    return f"shape {tuple(shape)} of {name} on {device}"


def require_saved_of(
    dy: torch.Tensor, rows: dict, parameters: dict, stats: dict
) -> None:
    """`require_saved` where no launch of the forward is kept: shapes and device follow
    from the gradient of its output.

    Autograd has compared `dy` with that output already.

    Args:
        rows, parameters, stats: tensors by name, or None: those of dy's shape; weight
            and bias; (rows,) or in the shape of the rows.
    """
    shape = tuple(dy.shape)
    expected = [Saved(name, shape) for name in rows]
    for name, t in parameters.items():
        dimensions = 2 if t is not None and t.dim() == 2 else 1
        expected.append(Saved(name, shape[-dimensions:]))
    of_rows = shape[:-1]
    for name, t in stats.items():
        flat = t is not None and t.dim() == 1
        expected.append(
            Saved(name, (math.prod(of_rows),) if flat else of_rows, torch.float32)
        )
    tensors = (*rows.values(), *parameters.values(), *stats.values())
    require_saved(dy.device, tuple(expected), tensors)


def as_saved(strides: tuple, x: torch.Tensor, weight, bias, gate, rstd, mean) -> tuple:
    """x in these strides, the gate as it is, and the rest row-major."""
    if x.stride() != strides:
        x = torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(
            x
        )
    weight, bias, rstd, mean = (
        t if t is None else t.contiguous() for t in (weight, bias, rstd, mean)
    )
    return x, weight, bias, gate, rstd, mean

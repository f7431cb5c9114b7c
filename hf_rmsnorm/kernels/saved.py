"""What a backward expects of the tensors that its forward saved.

``weight.data = torch.empty(0)``, as offloading by hand does, changes such a tensor behind autograd. A kernel would read
past its end.
"""

import math
from typing import NamedTuple

import torch


class Saved(NamedTuple):
    """What a saved tensor is to be; a dtype of None is any."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None


def saved_of_rows(named: dict[str, torch.Tensor | None], rows: int) -> tuple[Saved | None, ...]:
    """What is expected of these tensors, in their order, and of the statistics behind them; None for an absent one."""
    operands = (None if t is None else Saved(name, tuple(t.shape), t.dtype) for name, t in named.items())
    return *operands, *(Saved(name, (rows,), torch.float32) for name in ("rstd", "mean"))


def require_saved(device: torch.device, expected: tuple[Saved | None, ...], tensors: tuple) -> None:
    """Do nothing where each tensor is what is expected of it; one that is absent, or of which nothing is, passes.

    Raises:
        RuntimeError: a tensor has another shape, dtype or device.
    """
    for saved, t in zip(expected, tensors, strict=True):
        if saved is None or t is None:
            continue
        dtype = saved.dtype or t.dtype
        if t.shape == saved.shape and t.dtype == dtype and t.device == device:
            continue
        raise RuntimeError(
            f"{saved.name} changed between forward and backward: the backward expects "
            f"{_words(saved.shape, dtype, device)}, and finds {_words(t.shape, t.dtype, t.device)}; "
            "keep what a forward has read as it is until its backward has run"
        )


def _words(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> str:
    return f"shape {tuple(shape)} of {str(dtype).removeprefix('torch.')} on {device}"


def require_saved_of(dy: torch.Tensor, rows: dict, parameters: dict, stats: dict, dtype: torch.dtype | None = None):
    """`require_saved` where no plan of the forward says what is expected: by the gradient of its output.

    Autograd has held `dy` against that output already.

    Args:
        rows, parameters, stats: tensors by name, or None: those of dy's shape; weight and bias; (rows,) or in the shape
            of the rows.
        dtype: that of rows and parameters, where it is known.
    """
    shape, expected = tuple(dy.shape), []
    expected += [Saved(name, shape, dtype) for name in rows]
    for name, t in parameters.items():
        of_heads = t is not None and t.dim() == 2
        expected.append(Saved(name, shape[-2:] if of_heads else shape[-1:], dtype))
    for name, t in stats.items():
        flat = t is not None and t.dim() == 1
        expected.append(Saved(name, (math.prod(shape[:-1]),) if flat else shape[:-1], torch.float32))
    require_saved(dy.device, tuple(expected), (*rows.values(), *parameters.values(), *stats.values()))


def as_saved(strides: tuple, x: torch.Tensor, weight, bias, gate, rstd, mean) -> tuple:
    """x in these strides, the gate as it is, and the rest row-major."""
    if x.stride() != strides:
        x = torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)
    weight, bias, rstd, mean = (t if t is None else t.contiguous() for t in (weight, bias, rstd, mean))
    return x, weight, bias, gate, rstd, mean

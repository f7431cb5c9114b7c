"""A norm computed together with the sum that it reads, kept until the norm is called with that very sum.

`add + norm` is one launch, but a model adds in one place and calls the norm in another, as a module with its hooks. So
the sum's maker hands over what the norm computes, and the norm's forward returns it where the tensor that arrives is
that sum, unmodified (identity and version of the sum and of the parameters, and their address). Else it computes.
"""

import threading
import weakref
from typing import NamedTuple

import torch

from ..ops.direct import capturing, state, version


class _HandedOver(NamedTuple):
    norm: weakref.ref
    total: weakref.ref
    weight: weakref.ref | None
    bias: weakref.ref | None
    operands: tuple
    output: object


class _Slot(threading.local):
    held: _HandedOver | None = None  # by thread: another one in the same model has its own


slot = _Slot()
# Norms that were given a sum in another dtype than it has, as Mamba's of a stream in float32: computed ahead in vain.
given_otherwise: weakref.WeakSet = weakref.WeakSet()


def _reference(t: torch.Tensor | None) -> weakref.ref | None:
    return None if t is None else weakref.ref(t)  # the same object each time, so that `is` compares tensors


def _operands(x, weight, bias, spec, backend) -> tuple:
    versions = version(x), state(weight), state(bias)
    return versions, torch.is_grad_enabled(), capturing(x), backend, spec


def holds_rows_of(x: torch.Tensor, total: torch.Tensor) -> bool:
    """Whether x is a view of all of `total` that has its rows in the same order, as ``total.reshape(-1, n)`` is."""
    return (
        x._base is total
        and x.shape[-1:] == total.shape[-1:]
        and x.numel() == total.numel()
        and x.is_contiguous()
        and total.is_contiguous()
    )


def hand_over(norm: torch.nn.Module, total: torch.Tensor, output, weight, bias, spec, backend: str) -> None:
    """Keep what `norm` computes of `total`; what nobody took before is dropped, and this when `total` dies."""
    place = slot.__dict__  # of this thread

    def drop(reference: weakref.ref) -> None:  # perhaps in another thread than this one
        held = place.get("held")
        if held is not None and held.total is reference:
            place["held"] = None

    slot.held = _HandedOver(
        weakref.ref(norm), weakref.ref(total, drop), _reference(weight), _reference(bias),
        _operands(total, weight, bias, spec, backend), output,
    )  # fmt: skip


def handed_over(norm: torch.nn.Module, x: torch.Tensor, weight, bias, spec, backend: str):
    """What was kept for this call of `norm`, once; None where any of all this was another, or has changed since."""
    held = slot.held
    if held is None or held.norm() is not norm:
        return None
    total = held.total()
    reshaped = total is not x and total is not None and x._base is total and holds_rows_of(x, total)
    if total is not x and not reshaped:
        if total is not None and total.dtype != x.dtype:
            given_otherwise.add(norm)
        return None
    slot.held = None
    if held.weight is not _reference(weight) or held.bias is not _reference(bias):
        return None
    output = held.output
    if isinstance(output, torch.Tensor) and output.requires_grad and (x._backward_hooks or x.retains_grad):
        return None  # the output is in the graph beside x: its gradient would pass by what hangs on x
    if held.operands != _operands(x, weight, bias, spec, backend):
        return None
    if not reshaped:
        return output
    if isinstance(output, torch.Tensor) and output.requires_grad:
        return None  # it is in the graph beside the view, which may be cut off there
    # Nobody could write in place to what a Function returns, if that were a view.
    shaped = torch.ops.aten._unsafe_view
    return shaped(output, x.shape) if isinstance(output, torch.Tensor) else (shaped(output[0], x.shape), *output[1:])

"""A norm computed together with the sum that it reads, kept until the norm is called with that very sum.

`add + norm` is one launch, but a model adds in one place and calls the norm in another, as a module with its hooks. So
the sum's maker leaves the norm's output here, and the norm's forward takes it where the tensor that arrives is the one
that was left, unmodified (identity and version counter, of the sum and of the weight). Else it computes.
"""

from __future__ import annotations

import threading
import weakref
from typing import NamedTuple

import torch


class _Left(NamedTuple):
    norm: weakref.ref
    total: weakref.ref
    total_version: int | None
    weight: torch.Tensor | None
    weight_version: int
    grad_enabled: bool
    output: torch.Tensor


class _Slot(threading.local):
    left: _Left | None = None  # by thread: another one in the same model has its own


_slot = _Slot()


def _version(t: torch.Tensor | None) -> int | None:
    return None if t is None or t.is_inference() else t._version


def leave(norm: torch.nn.Module, total: torch.Tensor, output: torch.Tensor, weight: torch.Tensor | None) -> None:
    """Leave the output of `norm` for `total`; what nobody took before is dropped, and this when `total` dies."""

    def drop(reference: weakref.ref) -> None:
        left = _slot.left
        if left is not None and left.total is reference:
            _slot.left = None

    _slot.left = _Left(
        weakref.ref(norm), weakref.ref(total, drop), _version(total), weight, _version(weight),
        torch.is_grad_enabled(), output,
    )  # fmt: skip


def take(norm: torch.nn.Module, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor | None:
    """What was left for this call of `norm`, once; None where it was another norm, tensor, version or weight."""
    left = _slot.left
    if left is None or left.total() is not x or left.norm() is not norm:
        return None
    _slot.left = None
    if (
        left.total_version != _version(x)
        or left.weight is not weight
        or left.weight_version != _version(weight)
        or left.grad_enabled != torch.is_grad_enabled()
    ):
        return None
    return left.output

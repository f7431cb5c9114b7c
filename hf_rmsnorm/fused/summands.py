"""The two summands of a residual sum, kept for a norm that reads their sum before it is rounded.

They hang on the storage of the sum. So they are found through views, `detach`, and what a checkpoint has saved, and go
when the sum goes.
"""

import threading
import weakref
from typing import NamedTuple

import torch

from ..formula import HALF_DTYPES
from ..ops.direct import DIRECT_TYPES, under_transform, version

_HELD = "_hf_rmsnorm_summands"


class _Summands(NamedTuple):
    norm: weakref.ref | None
    version: int | None
    place: tuple[torch.Size, tuple[int, ...], int]  # shape, strides and offset of the sum
    left: torch.Tensor | None  # None once they are gone
    right: torch.Tensor | None
    returned: bool


class _Awaited(threading.local):
    def __init__(self):  # by thread: another one in the same model has its own
        self.of: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


_awaited = _Awaited()


def keep_summands(norm: torch.nn.Module | None, total, left, right, returned: bool, again: bool) -> None:
    """Keep the summands of ``total = left + right``; those of a sum that is a summand itself go, as its norm has run.

    Args:
        norm: which is known to read the sum, if one is.
        returned: a layer returns the sum.
        again: there may be a checkpoint around the next layer, whose norm then reads what is returned once more.
    """
    for summand in (left, right):
        before = vars(summand.untyped_storage()).get(_HELD)
        if before is not None and not (before.returned and again):
            setattr(summand.untyped_storage(), _HELD, before._replace(left=None, right=None))
    if total.dtype in HALF_DTYPES:  # a sum in float32 is what it is
        storage = total.untyped_storage()
        operands = _place(total), *(t.detach().expand(total.shape) for t in (left, right))
        kept = _Summands(None if norm is None else weakref.ref(norm), version(total), *operands, returned)
        setattr(storage, _HELD, kept)
        if norm is not None:
            _awaited.of[norm] = weakref.ref(storage)


def _place(t: torch.Tensor) -> tuple:
    return t.shape, t.stride(), t.storage_offset()


def summands_of(norm: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The summands of x, in its shape; None where it is no sum that was kept.

    Raises:
        RuntimeError: a sum was kept for this norm, and this is another tensor; or its summands are gone.
    """
    if x.dtype not in HALF_DTYPES or type(x) not in DIRECT_TYPES or under_transform():
        return None
    kept = vars(x.untyped_storage()).get(_HELD)
    awaited = _awaited.of.pop(norm, None)
    if kept is None or kept.version != version(x):
        if awaited is not None and awaited() is not None:
            raise RuntimeError(
                f"the sum that this {type(norm).__name__} is to read unrounded was moved, changed or copied: patch the "
                "model with fuse_residual=False, by which sums are rounded first"
            )
        return None
    if kept.left is None:
        if kept.norm is not None and kept.norm() is norm:
            raise RuntimeError(
                f"the sum that this {type(norm).__name__} is to read unrounded was read before, and its summands are "
                "gone: in eval mode without gradients each is read once, before the next sum is made of it"
            )
        return None
    if _place(x) == kept.place:
        return kept.left, kept.right
    return tuple(_seen_as(x, t, *kept.place) for t in (kept.left, kept.right))


def _seen_as(x: torch.Tensor, t: torch.Tensor, shape: torch.Size, stride: tuple[int, ...], offset: int) -> torch.Tensor:
    """What x, a view of a sum that lies so, is of the summand t."""
    laid_out = torch.empty_strided(shape, stride, dtype=t.dtype, device=t.device).copy_(t)
    return laid_out.as_strided(x.shape, x.stride(), x.storage_offset() - offset)

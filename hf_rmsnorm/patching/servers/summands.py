"""The two summands of a residual sum, kept for a norm that reads their sum before it is
rounded.

They are kept with the storage of the sum. So `detach` and the tensors that a checkpoint
saved lead to them, and they are freed with the sum.
"""

import warnings
import weakref
from typing import NamedTuple

from torch import Tensor
from torch.nn import Module

from ...formula import HALF_DTYPES
from ...ops.backend import under_transform
from ...ops.launches import TENSOR_TYPES

_HELD = "_hf_rmsnorm_summands"
_readers = weakref.WeakSet()  # norms that have read an unrounded sum
_warned = weakref.WeakSet()


class _Summands(NamedTuple):
    state: tuple  # of the sum
    left: Tensor
    right: Tensor


def keep_summands(total: Tensor, left: Tensor, right: Tensor, again: bool):
    """Keep the summands of ``total = left + right``.

    Args:
        again: a checkpoint may run the readers of earlier sums a second time. Else
            those of a sum that is a summand itself go, as its norm has run.
    """
    for summand in (left, right):
        storage = summand.untyped_storage()
        if not again and _HELD in vars(storage):
            delattr(storage, _HELD)
    if total.dtype in HALF_DTYPES:  # a sum in float32 is not rounded
        left = left.detach().expand(total.shape)
        right = right.detach().expand(total.shape)
        summands = _Summands(_state(total), left, right)
        setattr(total.untyped_storage(), _HELD, summands)


def summands_of(norm: Module, x: Tensor) -> tuple | None:
    """The summands of x; None if none were kept, with one warning if they were kept
    before.
    """
    if x.dtype not in HALF_DTYPES or type(x) not in TENSOR_TYPES or under_transform():
        return None
    kept = vars(x.untyped_storage()).get(_HELD)
    if kept is None or kept.state != _state(x):
        if norm in _readers and norm not in _warned:
            _warned.add(norm)
            warnings.warn(
                f"this {type(norm).__name__} reads residual sums unrounded, and this one was moved, changed, copied or "
                "read before: it is rounded first. Patch with fuse_residual=False, by which all sums are",
                stacklevel=3,
            )
        return None
    _readers.add(norm)
    return kept.left, kept.right


def _state(t: Tensor) -> tuple:
    written = None if t.is_inference() else t._version
    return written, t.shape, t.stride(), t.storage_offset()

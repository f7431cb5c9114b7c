"""The two summands of a residual sum, kept for a norm that reads their sum before it is
rounded; and that norm.

They are kept with the storage of the sum. So `detach` and the tensors that a checkpoint
saved lead to them, and they are freed with the sum.
"""

import warnings
import weakref
from typing import NamedTuple

import torch
from torch import Tensor, is_grad_enabled
from torch.nn import Module

from ...formula import HALF_DTYPES, NormSpec
from ...kernels.operands import any_requires_grad, of_sum, row_major
from ...ops.autograd import forward_kind, norm_gradients
from ...ops.backend import under_transform
from ...ops.launches import TENSOR_TYPES, by_kernel, launches_of
from ...ops.norm import resolve_backend
from ...reference import reference_norm

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


class _NormOfSummands(torch.autograd.Function):
    @staticmethod
    def forward(ctx, total, weight, bias, left, right, spec):
        y, rstd, mean = _computed(total, left, right, weight, bias, spec, True)
        ctx.save_for_backward(total, left, right, weight, bias, rstd, mean)
        ctx.kept = launches_of(spec), total.stride(), False
        return y

    @staticmethod
    def backward(ctx, dy):
        total, left, right, weight, bias, rstd, mean = ctx.saved_tensors
        h = left.float() + right.float()
        if is_grad_enabled():  # create_graph, for which it is one of the sum
            h = total + (h - total).detach()
        saved = h, weight, bias, None, None, rstd, mean
        need = *ctx.needs_input_grad[:3], False, False
        dx, dweight, dbias, *_ = norm_gradients(ctx.kept, saved, dy, None, need)
        if dx is not None:
            dx = dx.to(total.dtype)
        return dx, dweight, dbias, None, None, None


def norm_of_summands(total, left, right, weight, bias, spec: NormSpec) -> Tensor:
    """The norm of ``left + right`` in float32, as `RMSNorm` of vLLM and of SGLang
    computes it of a residual sum.

    In the graph it is a function of their rounded sum, whose gradient is that of both
    summands.

    Args:
        total: ``left + right``, rounded.
        left, right: (..., hidden_size) in float16 or bfloat16, any strides.
        weight, bias: (hidden_size,) or None, as the spec says.

    Returns:
        (..., hidden_size) in ``spec.output_dtype``.
    """
    weight, bias = row_major(weight, bias)
    if is_grad_enabled() and any_requires_grad((total, weight, bias)):
        return _NormOfSummands.apply(total, weight, bias, left, right, spec)
    return _computed(total, left, right, weight, bias, spec, False)[0]


def _computed(total, left, right, weight, bias, spec: NormSpec, stats: bool) -> tuple:
    """(y, rstd, mean), the latter two None where they are not asked for, or plain torch
    computes.
    """
    if resolve_backend(total, weight, bias, spec) == "triton":
        kind = forward_kind(stats, keep_sum=False)
        operands = of_sum(left, right, weight, bias)
        made = by_kernel(launches_of(spec), kind, operands)
        if made is not None:
            _, *computed = made
            return computed
    with torch.no_grad():
        return reference_norm(right, weight, bias, spec, residual=left), None, None

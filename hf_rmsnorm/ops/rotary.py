"""The rotary embedding of queries and keys in one launch, where no norm stands in front
of it.
"""

import torch
from torch import is_grad_enabled

from ..kernels.rows import strided_without_data, without_data
from ..reference import rotated
from .backend import why_not_rotated
from .direct import any_requires_grad, starts_kernels
from .gradients import gradients_of_all, needs_operators
from .launches import KeptLaunches
from .launching import by_kernel
from .loading import kernels

_launches = KeptLaunches()


class _RotaryFunction(torch.autograd.Function):
    """Keeps cos and sin alone for its backward: a rotation is linear in q and k."""

    @staticmethod
    def forward(ctx, call, q, k, cos, sin):
        _, launch = call
        ctx.save_for_backward(cos, sin)
        strides = without_data(q).stride(), without_data(k).stride()
        ctx.kept = launch.way, q.dtype, strides
        return launch.launch((q, k, cos, sin))

    @staticmethod
    def backward(ctx, dq, dk):
        operands = dq, dk, *ctx.saved_tensors
        grads = None
        if not needs_operators():
            kind = "rotary, backward", *ctx.kept
            grads = by_kernel(_launches, kind, operands, _make_backward)
        if grads is None:
            way, dtype, *_ = ctx.kept
            grads = _by_formula(operands, way, dtype)
        return None, *grads, None, None


def _by_formula(operands: tuple, way: str, dtype: torch.dtype) -> list:
    *gradients, cos, sin = operands

    def formula(*tensors):
        return [rotated(x, cos, sin, way) for x in tensors]

    # at any q and k: it is linear
    inputs = [torch.zeros_like(dy, dtype=dtype, requires_grad=True) for dy in gradients]
    return gradients_of_all(formula, inputs, gradients, (True, True))


def run_rotary(operands: tuple, way: str) -> tuple | None:
    """The heads of q and k, rotated in one launch; None as of `run_qk`.

    Args:
        operands: q, k, cos and sin, as `run_qk` takes them.
        way: how they are rotated, as in `reference.rotated`.

    Returns:
        (q', k') in the dtypes and strides that the same operators in plain torch give,
        or None.
    """
    if not starts_kernels():
        return None
    apply = None
    if is_grad_enabled() and any_requires_grad(operands):
        *_, cos, sin = operands
        if any_requires_grad((cos, sin)):
            return None
        apply = _RotaryFunction.apply
    kind = "rotary", way
    return by_kernel(_launches, kind, operands, _make_forward, apply)


def _make_forward(launches: KeptLaunches, kind: tuple, operands: tuple, aligned: bool):
    _, way = kind
    if why_not_rotated(*operands) is not None:
        return None
    q, k, cos, sin = map(strided_without_data, operands)
    results = rotated(q, cos, sin, way), rotated(k, cos, sin, way)
    return kernels().Rotary(operands, results, aligned, way, False)


def _make_backward(launches: KeptLaunches, kind: tuple, operands: tuple, aligned: bool):
    _, way, dtype, strides = kind
    if why_not_rotated(*operands) is not None:
        return None
    results = []
    for dy, steps in zip(operands, strides, strict=False):
        dx = torch.empty_strided(dy.shape, steps, dtype=dtype, device="meta")
        results.append(dx)
    return kernels().Rotary(operands, tuple(results), aligned, way, True)

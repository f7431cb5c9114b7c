"""The rotary embedding of queries and keys in one launch, where no norm stands in front
of it.
"""

import torch
from torch import is_grad_enabled

from ..formula import Rotation
from ..kernels.rows import strided_without_data
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
        _, ctx.launch = call
        ctx.save_for_backward(cos, sin)
        return ctx.launch.launch((q, k, cos, sin))

    @staticmethod
    def backward(ctx, dq, dk):
        operands = dq, dk, *ctx.saved_tensors
        grads = None
        if not needs_operators():
            grads = by_kernel(_launches, (ctx.launch,), operands, _make_backward)
        if grads is None:
            grads = _by_formula(ctx.launch, operands)
        return None, *grads, None, None


def _by_formula(launch, operands: tuple) -> list:
    *gradients, cos, sin = operands

    def formula(*tensors):
        return [rotated(x, cos, sin, launch.way) for x in tensors]

    # At any q and k, as it is linear; not made like the gradients, which may be batched.
    inputs = []
    for x in launch.inputs:
        zeros = torch.zeros(x.shape, dtype=x.dtype, device=cos.device)
        inputs.append(zeros.requires_grad_())
    return gradients_of_all(formula, inputs, gradients, (True, True))


def run_rotary(operands: tuple, way: Rotation) -> tuple | None:
    """The heads of q and k, rotated in one launch; None as of `run_qk`.

    Args:
        operands: q, k, cos and sin, as `reference.rotated` takes them.

    Returns:
        (q', k') in the dtypes and strides that the same operators in plain torch give,
        or None.
    """
    if not starts_kernels():
        return None
    apply = None
    if is_grad_enabled() and any_requires_grad(operands):
        if any_requires_grad(operands[2:]):
            return None
        apply = _RotaryFunction.apply
    return by_kernel(_launches, (way,), operands, _make_forward, apply)


def _make_forward(launches: KeptLaunches, kind: tuple, operands: tuple, aligned: bool):
    (way,) = kind
    if why_not_rotated(*operands, way) is not None:
        return None
    q, k, cos, sin = map(strided_without_data, operands)
    results = rotated(q, cos, sin, way), rotated(k, cos, sin, way)
    return kernels().Rotary(operands, results, aligned, way)


def _make_backward(launches: KeptLaunches, kind: tuple, operands: tuple, aligned: bool):
    (forward,) = kind
    way = forward.way
    if why_not_rotated(*operands, way) is not None:
        return None
    return kernels().Rotary(operands, forward.inputs, aligned, way, back=True)

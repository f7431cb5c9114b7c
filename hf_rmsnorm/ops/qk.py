"""The rotary embedding of queries and keys in one launch, with the norms in front of it
or without any.

The forwards of patched attentions, in `fused.attention`, call `run_qk` and `run_rotary`.
`launches.by_kernel` finds the launch, by the kinds of `qk_kinds`.
"""

from collections.abc import Callable

import torch
from torch import Tensor, is_grad_enabled

from ..formula import NormSpec
from ..operands import Operands, any_requires_grad, of_rotation
from ..reference import reference_norm
from .autograd import gradients
from .backend import starts_kernels
from .launches import Launches, by_kernel
from .qk_kinds import (
    HeadsBackwardKind,
    HeadsForwardKind,
    Rotary,
    RotaryBackwardKind,
)
from .saved import saved_tensors, unwatched

_rotations = Launches(None)


def run_rotary(operands: Operands, rotary: Rotary) -> tuple[Tensor, Tensor] | None:
    """q and k, rotated in one launch: `run_qk` without norms.

    Args:
        operands: q, k, cos and sin, as `reference.rotated` takes them.
    """
    return run_qk(_rotations, of_rotation(*operands), rotary)


def run_qk(
    launches: Launches,
    operands: Operands,
    rotary: Rotary,
    norms: tuple[Callable, Callable] | None = None,
) -> tuple[Tensor, Tensor] | None:
    """The heads of q and k, normalised and rotated in one launch.

    None where no kernel serves such tensors, or where something has to see the
    operators. They may be transposed views and slices of a packed projection. The
    weights may have another dtype than q and k, and so may cos and sin, as under
    autocast: the results are promoted as in plain torch.

    Args:
        operands: `HeadOperands`.
        rotary: how they are rotated; with norms halves, as `Rotation.turns_halves` says.
        norms: the code that is replaced, that of q and that of k; None where it is the
            formula in plain torch.

    Returns:
        (q', k') in the dtypes and strides that the same operators in plain torch give,
        or None.
    """
    if not starts_kernels():
        return None
    replaced = normed_and_rotated, launches.spec, operands, rotary, norms
    if not (is_grad_enabled() and any_requires_grad(operands)):
        kind = HeadsForwardKind(rotary, False)
        made = by_kernel(launches, kind, operands, None, replaced)
        if made is None:
            return None
        yq, yk, rstd = made
        return yq, yk
    q, k, q_weight, k_weight, cos, sin = operands
    if any_requires_grad((cos, sin)):
        return None
    of_q = any_requires_grad((q, q_weight))
    if of_q != any_requires_grad((k, k_weight)) and k.numel():
        return None  # the other must not ask for gradients, as results of a launch do
    function = _RotaryFunction if launches.spec is None else _QKFunction
    kind = HeadsForwardKind(rotary, True)
    return by_kernel(launches, kind, operands, function.apply, replaced)


def normed_and_rotated(
    spec: NormSpec | None,
    operands: Operands,
    rotary: Rotary,
    norms: tuple[Callable, Callable] | None = None,
) -> tuple[Tensor, Tensor]:
    """The code that a forward replaces: norms, and then the model's function.

    Args:
        norms: as of `run_qk`.
    """
    q, k, q_weight, k_weight, cos, sin = operands
    if norms is not None:
        norm_q, norm_k = norms
        q = norm_q(q)
        k = norm_k(k)
    elif spec is not None:
        q = reference_norm(q, q_weight, None, spec)
        k = reference_norm(k, k_weight, None, spec)
    return rotary.function(q, k, cos, sin)


class _QKFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, *operands):
        launches, launch = call
        q, k, q_weight, k_weight, cos, sin = operands
        yq, yk, rstd = launch.on(operands)
        ctx.save_for_backward(*operands, rstd)
        ctx.of_forward = launches, launch.way
        ctx.weight = id(q_weight)
        ctx.unwatched = unwatched(q)
        return yq, yk

    @staticmethod
    def backward(ctx, dq, dk):
        launches, way = ctx.of_forward
        kind = HeadsBackwardKind(ctx.needs_input_grad[1:5], way)
        operands = dq, dk, *saved_tensors(ctx, launches)
        return None, *gradients(launches, kind, operands), None, None


class _RotaryFunction(torch.autograd.Function):
    """Keeps cos and sin alone for its backward: a rotation is linear in q and k."""

    @staticmethod
    def forward(ctx, call, *operands):
        rotations, ctx.launch = call
        *_, cos, sin = operands
        ctx.save_for_backward(cos, sin)
        yq, yk, rstd = ctx.launch.on(operands)
        return yq, yk

    @staticmethod
    def backward(ctx, dq, dk):
        kind = RotaryBackwardKind(ctx.launch)
        operands = of_rotation(dq, dk, *ctx.saved_tensors)
        dxq, dxk, *_ = gradients(_rotations, kind, operands)
        return None, dxq, dxk, None, None, None, None

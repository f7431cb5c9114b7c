"""A norm in autograd's graph: `norm.run_norm` applies `NormFunction`, whose backward is one
launch too, or the plain formula for `create_graph`, functorch and compilers.
"""

import torch
from torch import is_grad_enabled
from torch.compiler import is_compiling

from ..operands import NormOperands, Operands
from .backend import operators_are_seen
from .kinds import Kind
from .launches import Launches, by_kernel
from .limits import serves_as_input
from .norm_kinds import NormBackwardKind
from .saved import saved_tensors, unwatched

_MULTIPLIER = 1 + NormOperands._fields.index("multiplier")  # behind the launch


class NormFunction(torch.autograd.Function):
    """The norm of x; or, with a residual, (h, the norm of h) of ``h = residual + x``.

    The operands are `NormOperands`.
    """

    # Old-style (ctx in forward): setup_context costs 15 microseconds a call.
    @staticmethod
    def forward(ctx, call, *operands):
        launches, launch = call
        x, weight, bias, gate, scale, shift, multiplier, residual = operands
        h, y, rstd, mean = launch.on(operands)
        kept = x if h is None else h
        if launches.keeps_output and serves_as_input(y, kept, launches.spec):
            kept = y
            mean = None
        ctx.of_forward = launches, launch.order, kept is y
        ctx.weight = id(weight)
        ctx.unwatched = unwatched(kept)
        multiplied = x if ctx.needs_input_grad[_MULTIPLIER] else None
        ctx.save_for_backward(
            kept, weight, bias, gate, scale, rstd, mean, multiplier, multiplied
        )
        if h is None:
            return y
        ctx.set_materialize_grads(False)
        return h, y

    @staticmethod
    def backward(ctx, *gradients):
        *of_sum, dy = gradients
        dh = of_sum[0] if of_sum else None
        _, need_x, *of_formula, need_shift, need_multiplier, need_residual = (
            ctx.needs_input_grad
        )
        launches, order, from_output = ctx.of_forward
        # once: a checkpoint gives them once
        *saved, multiplier, multiplied = saved_tensors(ctx, launches)
        dx = dh
        dweight = dbias = dgate = dscale = dmultiplier = None
        need_h = need_x or need_multiplier or need_residual
        need = need_h, *of_formula
        if dy is not None and any(need):
            kind = NormBackwardKind(order, need, from_output)
            dx, dweight, dbias, dgate, dscale = _gradients_with_dh(
                launches, kind, saved, dy, dh
            )
        dresidual = dx if need_residual else None
        dshift = dy if need_shift else None
        if multiplier is not None and dx is not None:
            if need_multiplier:
                dmultiplier = dx * multiplied
            dx = dx * multiplier
        if not need_x:
            dx = None
        return (
            None, dx, dweight, dbias, dgate, dscale, dshift, dmultiplier, dresidual
        )  # fmt: skip


# What Function.apply adds is for arguments by name and for functorch, neither of which
# gets here.
apply = super(torch.autograd.Function, NormFunction).apply


def _gradients_with_dh(
    launches: Launches, kind: NormBackwardKind, saved: Operands, dy, dh
) -> Operands:
    """(dx, dweight, dbias, dgate, dscale) inside a backward, in whatever that runs.

    Args:
        saved: x, weight, bias, gate, scale, rstd, mean.
        dy: the gradient of the norm.
        dh: another gradient of x, which is added to dx; or None.

    Raises:
        RuntimeError: an operand has another shape or device than the forward read; or
            gradients are on, and the norm's output was saved in place of x.
    """
    if kind.from_output and is_grad_enabled() and not is_compiling():
        raise RuntimeError(
            "create_graph=True differentiates a norm twice, for which it needs its input, and it keeps its output "
            "instead: call patch_model(model, memory_efficient=False) first"
        )
    x, weight, bias, gate, scale, rstd, mean = saved
    if not kind.need[0]:  # that of x
        dh = None
    # a kernel that reads a scale adds no dh: then it is added here
    added = dh if scale is None else None
    operands = dy, x, weight, bias, gate, scale, added, rstd, mean
    grads = gradients(launches, kind, operands)
    if dh is None or added is not None:
        return grads
    dx, *others = grads
    return dh + dx, *others


def gradients(launches: Launches, kind: Kind, operands: Operands) -> Operands:
    """The results of a backward: of a launch, or of the formula in plain torch. That is
    differentiable where gradients are on.
    """
    grads = None
    if not _needs_operators():
        grads = by_kernel(launches, kind, operands)
    if grads is None:
        grads = kind.results(launches, kind.in_rows(launches, operands))
    return grads


def _needs_operators() -> bool:
    """Whether what runs this backward needs operators it can see through: a compiler,
    another differentiation, functorch, a mode.
    """
    return is_compiling() or is_grad_enabled() or operators_are_seen()

"""The forward of a norm by a kernel that is started directly, with its place in
autograd's graph.
"""

import torch

from ..formula import HALF_DTYPES, NormSpec
from .backend import why_not
from .direct import present
from .from_output import serves_as_input
from .gradients import norm_gradients
from .launches import Launches
from .launching import checkpointed_version, saved_tensors
from .loading import kernels


class NormFunction(torch.autograd.Function):
    """The norm of x; or, with a residual, (h, the norm of h) of ``h = residual + x``.

    The operands are those of `kernels.launch.Operands`.
    """

    # Old-style (ctx in forward): setup_context costs 15 microseconds a call.
    @staticmethod
    def forward(ctx, call, *operands):
        launches, launch = call
        x, weight, bias, gate, _, factor, _ = operands
        h, y, rstd, mean = launch.launch(operands)
        kept = x if h is None else h
        strides = launch.strides
        if launches.keeps_output and serves_as_input(y, kept, launches.spec):
            kept = y
            strides = y.stride()
            mean = None
        elif launches.copies_input and kept.dtype in HALF_DTYPES:
            # The unpatched norm saves x in float32: a copy of a half-precision x, and a
            # float32 x itself.
            kept = kept.clone()
        ctx.kept = launches, strides, kept is y
        ctx.weight = id(weight)
        ctx.version = checkpointed_version(kept)
        x_of_factor = x if ctx.needs_input_grad[6] else None
        ctx.save_for_backward(kept, weight, bias, gate, rstd, mean, factor, x_of_factor)
        if h is None:
            return y
        ctx.set_materialize_grads(False)
        return h, y

    @staticmethod
    def backward(ctx, *gradients):
        *of_sum, dy = gradients
        dh = of_sum[0] if of_sum else None
        _, need_x, *of_formula, need_shift, need_factor, need_residual = (
            ctx.needs_input_grad
        )
        launches, _, _ = ctx.kept
        # once: a checkpoint gives them once
        *saved, factor, x = saved_tensors(ctx, launches)
        dx = dh
        dweight = dbias = dgate = dfactor = None
        if dy is not None:
            need_h = need_x or need_factor or need_residual
            need = need_h, *of_formula
            dx, dweight, dbias, dgate = norm_gradients(ctx.kept, saved, dy, dh, need)
        dresidual = dx if need_residual else None
        dshift = dy if need_shift else None
        if factor is not None and dx is not None:
            if need_factor:
                dfactor = dx * x
            dx = dx * factor
        if not need_x:
            dx = None
        return None, dx, dweight, dbias, dgate, dshift, dfactor, dresidual


# What Function.apply adds is for arguments by name and for functorch, neither of which
# gets here.
apply = super(torch.autograd.Function, NormFunction).apply


def make_forward(launches: Launches, kind: tuple, operands: tuple, aligned: bool):
    """The launch of a forward; None where no kernel serves such operands.

    Args:
        kind: ("forward", stats, keep_sum), as of `kernels.launch.NormForward`.
        operands: x, weight, bias, gate, shift, factor and residual.
    """
    _, stats, keep_sum = kind
    spec = launches.spec
    if spec.group_size is not None or why_not_launched(spec, operands) is not None:
        return None
    x, weight, bias, gate, _, _, residual = operands
    for parameter in present(weight, bias):
        if not parameter.is_contiguous():
            return None  # `fused_norm` copies them
    total = x
    if residual is not None and residual.element_size() > x.element_size():
        total = residual
    if launches.suits is not None and not launches.suits(total, weight, bias, gate):
        return None
    make = kernels().NormForward
    return make(spec, operands, aligned, stats, keep_sum, launches.modulation)


def why_not_launched(spec: NormSpec, operands: tuple) -> str | None:
    """Why one launch does not compute a norm of such operands, or None where it does.

    Without a gate in the formula, that operand is the scale of a modulation.
    """
    x, weight, bias, gate, _, _, residual = operands
    if gate is None or spec.gate is not None:
        return why_not(spec, x, weight, bias, gate, residual)
    reason = why_not(spec, x, weight, bias, None, residual)
    return reason or _why_not_modulated(*operands)


def _why_not_modulated(x, weight, bias, gate, shift, factor, residual) -> str | None:
    others = weight, bias, gate, shift, factor, residual
    dtypes = {t.dtype for t in present(*others)} - {x.dtype}
    if dtypes:
        return f"x is {x.dtype}, and what is computed with it {dtypes.pop()}"
    devices = {t.device for t in present(*others)} - {x.device}
    if devices:
        return f"x is on {x.device}, and what is computed with it on {devices.pop()}"
    if weight is not None and weight.dim() != 1:
        return "its weight is one of heads"
    if residual is not None and not (x.is_contiguous() and residual.is_contiguous()):
        return "a summand has gaps"
    strides = {t.stride() for t in present(gate, shift, factor)}
    if len(strides) > 1 or gate.stride(-1) != 1:
        return "scale, shift and gate lie differently in memory, or have gaps"
    return None

"""The forward of a norm by a kernel that is started directly, with its place in
autograd's graph.

`started` serves `norm.run` and modulations, `launched` the registered operator and what
has its own place in the graph.
"""

import torch

from ..formula import NormSpec
from .backend import why_not
from .from_output import serves_as_input
from .gradients import norm_gradients
from .launches import Launches, key_of
from .launching import by_kernel
from .loading import kernels


class NormFunction(torch.autograd.Function):
    """The norm of x; or, with a residual, (h, the norm of h) of ``h = residual + x``.

    The operands are those of `kernels.launch.Operands`.
    """

    # Old-style (ctx in forward): setup_context costs 15 microseconds a call.
    @staticmethod
    def forward(ctx, call, *operands):
        launches, launch, keep_output = call
        x, weight, bias, gate, _, factor, _ = operands
        y, rstd, mean, h = launch.launch(*operands)
        kept, strides = (x if h is None else h), launch.strides
        if keep_output and serves_as_input(y, kept, weight, bias, launches.spec):
            kept, strides, mean = y, y.stride(), None
        saved = kept, weight, bias, gate, rstd, mean
        if factor is None:
            ctx.save_for_backward(*saved)
        else:
            of_factor = x if ctx.needs_input_grad[6] else None
            ctx.save_for_backward(*saved, factor, of_factor)
        ctx.kept = launches, strides, kept is y
        if h is None:
            return y
        ctx.set_materialize_grads(False)
        return h, y

    @staticmethod
    def backward(ctx, *gradients):
        dh, dy = gradients if len(gradients) == 2 else (None, *gradients)
        _, need_x, *of_norm, need_shift, need_factor, need_residual = (
            ctx.needs_input_grad
        )
        kept = ctx.saved_tensors  # once: a checkpoint gives them once
        saved, factors = kept[:6], kept[6:]
        dx, dparameters = dh, (None, None, None)
        if dy is not None:
            need = need_x or need_factor or need_residual, *of_norm
            dx, *dparameters = norm_gradients(ctx.kept, saved, dy, dh, need)
        dresidual = dx if need_residual else None
        dshift = dy if need_shift else None
        dfactor = None
        if factors and dx is not None:
            factor, x = factors
            dfactor = dx * x if need_factor else None
            dx = dx * factor
        dx = dx if need_x else None
        return None, dx, *dparameters, dshift, dfactor, dresidual


# What Function.apply adds is for arguments by name and for functorch, neither of which
# gets here.
_apply = super(torch.autograd.Function, NormFunction).apply


def started(
    launches: Launches, key: tuple, operands: tuple, graded: bool, keep_output=False
):
    """The result of `NormFunction`; None where no kernel serves such operands.

    Args:
        key: their launch key.
        operands: x, weight, bias, gate, shift, factor and residual.
        graded: whether a gradient is asked for.
        keep_output: the backward shall read the output, where `serves_as_input`.
    """
    apply = _apply if graded else None
    made = by_kernel(launches, key, operands, _made, (graded,), apply, keep_output)
    if made is None or graded:
        return made
    y, _, _, h = made
    return y if h is None else (h, y)


def launched(
    launches: Launches, operands: tuple, stats: bool, keep_sum: bool = True
) -> tuple | None:
    """(y, rstd, mean, h) outside of autograd; None where no kernel serves such
    operands.
    """
    key = key_of(("launched", stats, keep_sum), operands)
    return by_kernel(launches, key, operands, _made, (stats, keep_sum))


def _made(
    launches: Launches, operands: tuple, aligned: bool, stats: bool, keep_sum=True
):
    x, weight, bias, gate, _, _, residual = operands
    spec = launches.spec
    if spec.group_size is not None or why_not_launched(spec, operands) is not None:
        return None
    if any(p is not None and not p.is_contiguous() for p in (weight, bias)):
        return None  # `fused_norm` copies them
    total = x
    if residual is not None and residual.element_size() > x.element_size():
        total = residual
    if launches.suits is not None and not launches.suits(total, weight, bias, gate):
        return None
    return kernels().NormForward(
        spec, operands, aligned, stats, keep_sum, launches.modulation
    )


def why_not_launched(spec: NormSpec, operands: tuple) -> str | None:
    """Why one launch does not compute a norm of such operands, or None where it does.

    Without a gate in the formula, that operand is the scale of a modulation.
    """
    x, weight, bias, gate, _, _, residual = operands
    if gate is None or spec.gate is not None:
        return why_not(spec, x, weight, bias, gate, residual)
    return why_not(spec, x, weight, bias, None, residual) or _why_not_modulated(
        *operands
    )


def _why_not_modulated(x, weight, bias, scale, shift, factor, residual) -> str | None:
    names = "weight", "bias", "scale", "shift", "gate", "residual"
    others = zip(names, (weight, bias, scale, shift, factor, residual), strict=True)
    for name, t in others:
        if t is not None and t.dtype != x.dtype:
            return f"x is {x.dtype} and {name} is {t.dtype}"
    if weight is not None and weight.dim() != 1:
        return "its weight is one of heads"
    if residual is not None and not (x.is_contiguous() and residual.is_contiguous()):
        return "a summand has gaps"
    if len({t.stride() for t in (scale, shift, factor) if t is not None}) > 1:
        return "scale, shift and gate lie differently in memory"
    if scale.stride(-1) != 1:
        return "the scale has gaps, or is one number a row"
    return None

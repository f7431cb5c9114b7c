"""`modulated_norm`: a norm, the scale and shift of an adaptive LayerNorm, and a gated sum before, in one launch."""

import torch

from ..formula import NormSpec
from ..kernels.failure import KernelUnavailable
from ..kernels.serves import of_rows, unserved
from ..reference import reference_norm
from .backend import give_up, resolve_backend
from .direct import is_direct, under_transform, version
from .gradients import differentiable
from .loading import kernels
from .norm import autocasts_functional


class _Modulated(torch.autograd.Function):
    """(the sum, the result) of `modulated_norm`; the sum is None where there is no residual."""

    @staticmethod
    def forward(ctx, x, residual, factor, *rest):
        weight, bias, scale, shift, spec = rest
        y, rstd, mean, h = _launch(x, residual, factor, *rest, True)
        of_factor = x if factor is not None and ctx.needs_input_grad[2] else None
        # A copy of the scale, as the operators keep the factor made of it: it may be written to behind them.
        kept = weight, bias, scale.clone(), shift, rstd, mean
        ctx.save_for_backward(of_factor, factor, x if h is None else h, *kept)
        ctx.spec, ctx.scale = spec, (scale, version(scale))
        ctx.set_materialize_grads(False)
        return h, y

    @staticmethod
    def backward(ctx, dh, dy):
        x, factor, *operands, rstd, mean = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: in which the scale is itself
            operands[3], known = ctx.scale
            if version(operands[3]) != known:
                raise RuntimeError("create_graph=True differentiates by a scale that was written to since the forward")
        need, need_x, need_residual, need_factor = ctx.needs_input_grad, *ctx.needs_input_grad[:3]
        of_norm = None, None, None, None, None
        if dy is not None:
            of_norm = _norm_gradients(dy, *operands, rstd, mean, ctx.spec, (any(need[:3]), *need[3:7]))
        dtotal, *others = of_norm
        if dh is not None:
            dtotal = dh if dtotal is None else dh + dtotal
        dx = dtotal if factor is None or not need_x or dtotal is None else dtotal * factor
        gated = need_factor and dtotal is not None
        dfactor = (dtotal * x).sum_to_size(factor.shape) if gated else None
        return dx if need_x else None, dtotal if need_residual else None, dfactor, *others, None


def _norm_gradients(dy, h, weight, bias, scale, shift, rstd, mean, spec, need):
    """The gradients of h and of the four behind it."""
    def formula(h, weight, bias, scale, shift):
        y = reference_norm(h, weight, bias, spec) * (1 + scale)
        return (y if shift is None else y + shift,)

    operands = h, weight, bias, scale, shift
    if torch.is_grad_enabled():  # create_graph: the formula itself is differentiable
        return differentiable(formula, operands, (dy,), need)
    each = scale.expand(h.shape)
    try:
        dh, dweight, dbias, dscale = kernels().norm_backward(dy, h, weight, bias, rstd, mean, spec, need[:4], each)
    except KernelUnavailable as error:
        give_up(error, dy.device)
        leaves = [t if t is None else t.detach().requires_grad_(n) for t, n in zip(operands, need, strict=True)]
        grads = differentiable(formula, tuple(leaves), (dy,), need)
        return [g if g is None else g.detach() for g in grads]
    dscale = None if dscale is None else dscale.sum_to_size(scale.shape)
    return dh, dweight, dbias, dscale, dy.sum_to_size(shift.shape) if need[4] else None


def _launch(x, residual, factor, weight, bias, scale, shift, spec, stats):
    scale, shift, factor = (t if t is None else t.expand(x.shape) for t in (scale, shift, factor))
    return kernels().norm_forward(x, weight, bias, spec, stats, scale, residual, shift=shift, factor=factor)


def modulated_norm(
    x, weight, bias, spec: NormSpec, scale, shift=None, residual=None, factor=None
) -> tuple[torch.Tensor | None, torch.Tensor] | None:
    """(h, ``norm(h) * (1 + scale) + shift``) of ``h = residual + factor * x``, bit for bit; None if not in one launch.

    As `AdaLayerNorm` of DiT (Peebles and Xie 2022) and of diffusers, whose operators round one by one.

    Args:
        x: (..., hidden_size).
        weight, bias: (hidden_size,) or None, as the spec says.
        scale, shift, factor: what broadcasts to x's shape, with the same strides there; shift and factor may be None.
        residual: x's shape, and contiguous as x is then; or None: h is None, and x is what is normalised.
    """
    modulation = [t for t in (scale, shift, factor) if t is not None]
    operands = [t for t in (x, residual, weight, bias, *modulation) if t is not None]
    if any(t.dtype != x.dtype for t in operands) or under_transform() or not is_direct(*operands):
        return None
    if x.dim() == 0 or spec.gate is not None or unserved(spec, *(families := of_rows(spec, x.shape[-1], True))):
        return None
    if families != ("forward", "backward") or (spec.functional and autocasts_functional(spec, x.device.type)):
        return None
    if resolve_backend(x, weight, bias, spec) != "triton" or (weight is not None and weight.dim() != 1):
        return None
    summands = [] if residual is None else [x, residual]
    if any(t.shape != x.shape or t.device != x.device or not t.is_contiguous() for t in summands):
        return None
    if summands and unserved(spec, "residual sum"):
        return None
    try:
        strides = {t.expand(x.shape).stride() for t in modulation}
    except RuntimeError:  # the plain operators say what does not broadcast, or broadcast x
        return None
    if len(strides) > 1:
        return None
    weight, bias = (t if t is None else t.contiguous() for t in (weight, bias))
    rest = residual, factor, weight, bias, scale, shift, spec
    try:
        if torch.is_grad_enabled() and any(t.requires_grad for t in operands):
            return _Modulated.apply(x, *rest)
        y, _, _, h = _launch(x, *rest, False)
    except KernelUnavailable as error:
        give_up(error, x.device)
        return None
    return h, y

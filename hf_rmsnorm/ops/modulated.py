"""`modulated_norm`: a norm, the scale and shift of an adaptive LayerNorm, and a gated sum before, in one launch."""

import torch

from ..formula import NormSpec
from ..kernels.failure import KernelUnavailable
from ..kernels.saved import Saved, require_saved
from ..kernels.serves import unserved
from ..reference import reference_norm
from .backend import give_up, resolve_backend
from .direct import is_direct, state, under_transform
from .gradients import norm_gradients
from .loading import kernels
from .norm import autocasts_functional


class _Modulated(torch.autograd.Function):
    """(the sum, the result) of `modulated_norm`; the sum is None where there is no residual."""

    @staticmethod
    def forward(ctx, x, residual, factor, *rest):
        weight, bias, scale, _, spec = rest
        plan, (y, rstd, mean, h) = _launch(x, residual, factor, *rest, True)
        of_factor = x if factor is not None and ctx.needs_input_grad[2] else None
        normed = x if h is None else h
        # A copy of the scale, as the operators keep the factor made of it: it may be written to behind them.
        ctx.save_for_backward(of_factor, factor, normed, weight, bias, scale.clone(), rstd, mean)
        ctx.spec, ctx.plan, ctx.strides = spec, plan, normed.stride()
        ctx.factor_shape = None if factor is None else factor.shape
        ctx.scale = scale, state(scale)
        ctx.set_materialize_grads(False)
        return h, y

    @staticmethod
    def backward(ctx, dh, dy):
        x, factor, *operands = ctx.saved_tensors
        need, need_x, need_residual, need_factor = ctx.needs_input_grad, *ctx.needs_input_grad[:3]
        if factor is not None:
            like = dy if dh is None else dh
            expected = Saved("x", like.shape, like.dtype), Saved("factor", ctx.factor_shape, like.dtype)
            require_saved(like.device, expected, (x, factor))
        of_norm = None, None, None, None
        if dy is not None:
            of_norm = _norm_gradients(ctx, dy, *operands, (any(need[:3]), *need[3:6]))
        dtotal, *others = of_norm
        if dh is not None:
            dtotal = dh if dtotal is None else dh + dtotal
        dx = dtotal if factor is None or not need_x or dtotal is None else dtotal * factor
        gated = need_factor and dtotal is not None
        dfactor = (dtotal * x).sum_to_size(factor.shape) if gated else None
        dshift = dy if need[6] else None  # which autograd sums to the shift's shape
        return dx if need_x else None, dtotal if need_residual else None, dfactor, *others, dshift, None


def _norm_gradients(ctx, dy, h, weight, bias, scale, rstd, mean, need):
    """The gradients of h and of the three behind it."""
    spec, plan = ctx.spec, ctx.plan
    if torch.is_grad_enabled():  # create_graph: in which the scale is itself
        scale = _scale_itself(scale, *ctx.scale)

    def formula(h, weight, bias, scale):
        return (reference_norm(h, weight, bias, spec) * (1 + scale),)

    operands = h, weight, bias, scale.expand(plan.shape), rstd, mean
    grads = norm_gradients(dy, *operands, spec, False, plan, ctx.strides, need, formula=formula)
    dh, dweight, dbias, dscale = grads
    return dh, dweight, dbias, None if dscale is None else dscale.sum_to_size(scale.shape)


def _scale_itself(kept: torch.Tensor, scale: torch.Tensor, known: tuple) -> torch.Tensor:
    require_saved(kept.device, (Saved("scale", kept.shape, kept.dtype),), (scale,))
    if state(scale) != known:
        raise RuntimeError("create_graph=True differentiates by a scale that was written to since the forward")
    return scale


def _launch(x, residual, factor, weight, bias, scale, shift, spec, stats):
    """The plan, and what it launched."""
    launch = kernels()
    scale, shift, factor = (t if t is None else t.expand(x.shape) for t in (scale, shift, factor))
    plan = launch.forward_plan(x, weight, bias, scale, spec, residual, True, shift, factor)
    return plan, launch.norm_forward(x, weight, bias, spec, stats, scale, residual, plan, True, shift, factor)


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
    if x.dim() == 0 or spec.gate is not None or (spec.functional and autocasts_functional(spec, x.device.type)):
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
        _, (y, _, _, h) = _launch(x, *rest, False)
    except KernelUnavailable as error:
        give_up(error, x.device)
        return None
    return h, y

"""`modulated_norm`: a norm, and the scale and shift of an adaptive LayerNorm behind it, in one launch."""

import torch

from ..formula import NormSpec
from ..kernels.serves import of_rows, unserved
from ..reference import reference_norm
from .backend import resolve_backend
from .direct import is_direct, under_transform
from .gradients import differentiable
from .loading import kernels
from .norm import autocasts_functional


class _Modulated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, scale, shift, spec):
        y, rstd, mean = _launch(x, weight, bias, scale, shift, spec, True)
        ctx.save_for_backward(x, weight, bias, scale, shift, rstd, mean)
        ctx.spec = spec
        return y

    @staticmethod
    def backward(ctx, dy):
        *operands, rstd, mean = ctx.saved_tensors
        x, weight, bias, scale, shift = operands
        spec = ctx.spec
        if torch.is_grad_enabled():  # create_graph: the formula itself is differentiable

            def formula(x, weight, bias, scale, shift):
                y = reference_norm(x, weight, bias, spec) * (1 + scale)
                return (y if shift is None else y + shift,)

            return *differentiable(formula, operands, (dy,), ctx.needs_input_grad[:5]), None
        need, each = tuple(ctx.needs_input_grad[:4]), scale.expand(x.shape)
        dx, dweight, dbias, dscale = kernels().norm_backward(dy, x, weight, bias, rstd, mean, spec, need, each)
        dscale = None if dscale is None else dscale.sum_to_size(scale.shape)
        dshift = dy.sum_to_size(shift.shape) if ctx.needs_input_grad[4] else None
        return dx, dweight, dbias, dscale, dshift, None


def _launch(x, weight, bias, scale, shift, spec, stats):
    scale, shift = (t if t is None else t.expand(x.shape) for t in (scale, shift))
    return kernels().norm_forward(x, weight, bias, spec, stats, scale, shift=shift)[:3]


def modulated_norm(x, weight, bias, spec: NormSpec, scale, shift=None) -> torch.Tensor | None:
    """``norm(x) * (1 + scale) + shift``, bit for bit, where one launch computes that; else None.

    As `AdaLayerNorm` of DiT (Peebles and Xie 2022) and of diffusers, whose operators round one by one.

    Args:
        x: (..., hidden_size).
        weight, bias: (hidden_size,) or None, as the spec says.
        scale, shift: what broadcasts to x's shape, with the same strides there; shift may be None.
    """
    operands = [t for t in (x, weight, bias, scale, shift) if t is not None]
    if any(t.dtype != x.dtype for t in operands) or under_transform() or not is_direct(*operands):
        return None
    if x.dim() == 0 or spec.gate is not None or unserved(spec, *(families := of_rows(spec, x.shape[-1], True))):
        return None
    if families != ("forward", "backward") or (spec.functional and autocasts_functional(spec, x.device.type)):
        return None
    if resolve_backend(x, weight, bias, spec) != "triton" or any(p.dim() != 1 for p in operands[1:-1] if p is weight):
        return None
    try:
        strides = {t.expand(x.shape).stride() for t in (scale, shift) if t is not None}
    except RuntimeError:  # the plain operators say what does not broadcast, or broadcast x
        return None
    if len(strides) > 1:
        return None
    weight, bias = (t if t is None else t.contiguous() for t in (weight, bias))
    if torch.is_grad_enabled() and any(t.requires_grad for t in operands):
        return _Modulated.apply(x, weight, bias, scale, shift, spec)
    return _launch(x, weight, bias, scale, shift, spec, False)[0]

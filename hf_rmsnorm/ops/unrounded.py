"""`norm_of_summands`: the norm of a residual sum as float32 holds it, where a model's own reads the rounded sum."""

import torch

from ..formula import NormSpec
from ..kernels.failure import KernelUnavailable
from ..kernels.saved import require_saved_of
from ..reference import reference_backward, reference_norm
from .backend import give_up, resolve_backend
from .direct import is_direct
from .gradients import differentiable
from .loading import kernels
from .operators import as_saved


class _NormOfSummands(torch.autograd.Function):
    @staticmethod
    def forward(ctx, total, weight, bias, left, right, spec, backend):
        y, rstd, mean = _launch(left, right, weight, bias, spec, backend, True)
        ctx.save_for_backward(total, left, right, weight, bias, rstd, mean)
        ctx.call = spec, backend, left.stride(), right.stride()
        return y

    @staticmethod
    def backward(ctx, dy):
        total, left, right, weight, bias, rstd, mean = ctx.saved_tensors
        spec, backend, *strides = ctx.call
        rows, parameters = {"residual + x": total, "residual": left, "x": right}, {"weight": weight, "bias": bias}
        require_saved_of(dy, rows, parameters, {"rstd": rstd, "mean": mean})
        left, weight, bias, rstd, mean = as_saved(strides[0], left, weight, bias, rstd, mean)
        (right,) = as_saved(strides[1], right)
        h, need = left.float() + right.float(), tuple(ctx.needs_input_grad[:3])
        if torch.is_grad_enabled():  # create_graph: the formula itself is differentiable, as a function of the sum

            def formula(total, weight, bias):
                rest = (h - total).detach()
                return (reference_norm(total + rest, weight, bias, spec).to(dy.dtype),)

            return *differentiable(formula, (total, weight, bias), (dy,), need), *[None] * 4
        dx, dweight, dbias, _ = _gradients(dy, h, weight, bias, rstd, mean, spec, need, backend)
        return None if dx is None else dx.to(total.dtype), dweight, dbias, *[None] * 4


def _gradients(dy, h, weight, bias, rstd, mean, spec, need, backend):
    if backend == "triton":
        try:
            return kernels().norm_backward(dy, h, weight, bias, rstd, mean, spec, need)
        except KernelUnavailable as error:
            give_up(error, dy.device)
    return reference_backward(dy, h, weight, bias, spec, need)


def norm_of_summands(
    total: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    spec: NormSpec,
) -> torch.Tensor:
    """The norm of ``left + right`` in float32, as `RMSNorm` of vLLM and of SGLang computes it of a residual sum.

    In the graph it is a function of their rounded sum, whose gradient is that of both summands.

    Args:
        total: ``left + right``, rounded.
        left, right: (..., hidden_size) in float16 or bfloat16, any strides.
        weight, bias: (hidden_size,) or None, as the spec says.

    Returns:
        (..., hidden_size) in ``spec.output_dtype``.
    """
    backend = resolve_backend(total, weight, bias, spec)
    if backend == "triton" and not is_direct(left, right, weight, bias):
        backend = "reference"
    weight, bias = (t if t is None else t.contiguous() for t in (weight, bias))
    try:
        return _computed(total, left, right, weight, bias, spec, backend)
    except KernelUnavailable as error:
        give_up(error, total.device)
    return _computed(total, left, right, weight, bias, spec, "reference")


def _computed(total, left, right, weight, bias, spec, backend):
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (total, weight, bias)):
        return _NormOfSummands.apply(total, weight, bias, left, right, spec, backend)
    return _launch(left, right, weight, bias, spec, backend, False)[0]


def _launch(left, right, weight, bias, spec, backend, stats):
    if backend == "triton":
        return kernels().norm_forward(right, weight, bias, spec, stats, None, left, keep_sum=False)[:3]
    with torch.no_grad():
        return reference_norm(right, weight, bias, spec, residual=left), None, None

"""`norm_of_summands`: the norm of a residual sum as float32 holds it, where a model's
own reads the rounded sum.
"""

import torch
from torch import Tensor, is_grad_enabled

from ...formula import NormSpec
from ...kernels.operands import any_requires_grad, of_sum, row_major
from ...ops.autograd import forward_kind, norm_gradients
from ...ops.launches import by_kernel, launches_of
from ...ops.norm import resolve_backend
from ...reference import reference_norm


class _NormOfSummands(torch.autograd.Function):
    @staticmethod
    def forward(ctx, total, weight, bias, left, right, spec):
        y, rstd, mean = _computed(total, left, right, weight, bias, spec, True)
        ctx.save_for_backward(total, left, right, weight, bias, rstd, mean)
        ctx.kept = launches_of(spec), total.stride(), False
        return y

    @staticmethod
    def backward(ctx, dy):
        total, left, right, weight, bias, rstd, mean = ctx.saved_tensors
        h = left.float() + right.float()
        if is_grad_enabled():  # create_graph, for which it is one of the sum
            h = total + (h - total).detach()
        saved = h, weight, bias, None, None, rstd, mean
        need = *ctx.needs_input_grad[:3], False, False
        dx, dweight, dbias, *_ = norm_gradients(ctx.kept, saved, dy, None, need)
        if dx is not None:
            dx = dx.to(total.dtype)
        return dx, dweight, dbias, None, None, None


def norm_of_summands(total, left, right, weight, bias, spec: NormSpec) -> Tensor:
    """The norm of ``left + right`` in float32, as `RMSNorm` of vLLM and of SGLang
    computes it of a residual sum.

    In the graph it is a function of their rounded sum, whose gradient is that of both
    summands.

    Args:
        total: ``left + right``, rounded.
        left, right: (..., hidden_size) in float16 or bfloat16, any strides.
        weight, bias: (hidden_size,) or None, as the spec says.

    Returns:
        (..., hidden_size) in ``spec.output_dtype``.
    """
    weight, bias = row_major(weight, bias)
    if is_grad_enabled() and any_requires_grad((total, weight, bias)):
        return _NormOfSummands.apply(total, weight, bias, left, right, spec)
    return _computed(total, left, right, weight, bias, spec, False)[0]


def _computed(total, left, right, weight, bias, spec: NormSpec, stats: bool) -> tuple:
    """(y, rstd, mean), the latter two None where they are not asked for, or plain torch
    computes.
    """
    if resolve_backend(total, weight, bias, spec) == "triton":
        kind = forward_kind(stats, keep_sum=False)
        operands = of_sum(left, right, weight, bias)
        made = by_kernel(launches_of(spec), kind, operands)
        if made is not None:
            _, *computed = made
            return computed
    with torch.no_grad():
        return reference_norm(right, weight, bias, spec, residual=left), None, None

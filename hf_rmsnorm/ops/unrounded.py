"""`norm_of_summands`: the norm of a residual sum as float32 holds it, where a model's
own reads the rounded sum.
"""

import torch

from ..formula import NormSpec
from ..kernels.failure import KernelUnavailable
from ..kernels.saved import as_saved, require_saved_of
from ..reference import reference_backward, reference_norm
from .backend import give_up, resolve_backend
from .direct import is_direct
from .gradients import gradients_of
from .launches import is_aligned, key_of, launches_of
from .loading import kernels
from .operators import launched_backward


class _NormOfSummands(torch.autograd.Function):
    @staticmethod
    def forward(ctx, total, weight, bias, left, right, call):
        spec, backend = call
        y, rstd, mean = _computed(left, right, weight, bias, spec, backend, True)
        ctx.save_for_backward(total, left, right, weight, bias, rstd, mean)
        ctx.call = *call, left.stride(), right.stride()
        return y

    @staticmethod
    def backward(ctx, dy):
        total, left, right, weight, bias, rstd, mean = ctx.saved_tensors
        spec, backend, of_left, of_right = ctx.call
        rows, parameters = (
            {"residual + x": total, "residual": left, "x": right},
            {"weight": weight, "bias": bias},
        )
        require_saved_of(dy, rows, parameters, {"rstd": rstd, "mean": mean})
        left, weight, bias, _, rstd, mean = as_saved(
            of_left, left, weight, bias, None, rstd, mean
        )
        right, *_ = as_saved(of_right, right, None, None, None, None, None)
        h, need = left.float() + right.float(), tuple(ctx.needs_input_grad[:3])
        if torch.is_grad_enabled():
            # create_graph: the formula itself is differentiable, as a function of the
            # sum

            def formula(total, weight, bias):
                rest = (h - total).detach()
                return reference_norm(total + rest, weight, bias, spec).to(dy.dtype)

            return (
                *gradients_of(formula, (total, weight, bias), dy, need),
                None,
                None,
                None,
            )
        operands, grads = (dy, h, weight, bias, None, None, rstd, mean), None
        if backend == "triton":
            grads = launched_backward(operands, spec, (*need, False))
        if grads is None:
            grads = reference_backward(dy, h, weight, bias, spec, need)
        dx, dweight, dbias, _ = grads
        return (
            None if dx is None else dx.to(total.dtype),
            dweight,
            dbias,
            None,
            None,
            None,
        )


def norm_of_summands(total, left, right, weight, bias, spec: NormSpec) -> torch.Tensor:
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
    backend = resolve_backend(total, weight, bias, spec)
    if backend == "triton" and not is_direct(left, right, weight, bias):
        backend = "reference"
    weight, bias = (t if t is None else t.contiguous() for t in (weight, bias))
    if torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (total, weight, bias)
    ):
        return _NormOfSummands.apply(total, weight, bias, left, right, (spec, backend))
    return _computed(left, right, weight, bias, spec, backend, False)[0]


def _computed(
    left, right, weight, bias, spec: NormSpec, backend: str, stats: bool
) -> tuple:
    """(y, rstd, mean), the latter two None where they are not asked for, or plain torch
    computes.
    """
    if backend == "triton":
        operands = right, weight, bias, None, None, None, left
        launches, key = launches_of(spec), key_of(("unrounded", stats), operands)
        try:
            launch = launches.kept.get(key)
            if launch is None:
                make = kernels().NormForward
                launch = launches.keep(
                    key, make(spec, operands, is_aligned(key), stats, keep_sum=False)
                )
            return launch.launch(*operands)[:3]
        except KernelUnavailable as error:
            give_up(error, right.device)
    with torch.no_grad():
        return reference_norm(right, weight, bias, spec, residual=left), None, None

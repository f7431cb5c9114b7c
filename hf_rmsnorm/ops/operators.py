"""The registered operators: what `torch.compile`, `torch.export` and tensor subclasses see of the kernels."""

from __future__ import annotations

import math

import torch

from ..formula import NormSpec
from ..reference import reference_backward, reference_norm, reference_stats
from .backend import plain, refusal

_SPEC = "float eps, bool centered, float weight_offset, str rounding, bool functional"
_library = torch.library.Library("hf_rmsnorm", "DEF")
_library.define(
    f"norm_forward(Tensor x, Tensor? weight, Tensor? bias, {_SPEC}, bool stats) -> (Tensor, Tensor, Tensor)"
)
_library.define(
    "norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor rstd, Tensor mean, "
    f"{_SPEC}, bool[3] need) -> (Tensor, Tensor, Tensor)"
)
norm_forward_op = torch.ops.hf_rmsnorm.norm_forward.default
norm_backward_op = torch.ops.hf_rmsnorm.norm_backward.default


def spec_args(spec: NormSpec) -> tuple:
    """The fields of a spec as the operators take them."""
    return spec.eps, spec.centered, spec.weight_offset, spec.rounding, spec.functional


def spec_from(weight, bias, eps, centered, weight_offset, rounding, functional) -> NormSpec:
    return NormSpec(
        centered=centered,
        eps=eps,
        has_weight=weight is not None,
        has_bias=bias is not None,
        weight_offset=weight_offset,
        rounding=rounding,
        functional=functional,
    )


def contiguous_output(spec: NormSpec) -> bool:
    """torch's own norms return row-major tensors; pointwise arithmetic keeps the order of its input's strides."""
    return spec.functional


def _none(t: torch.Tensor) -> torch.Tensor:
    return t.new_empty(0, dtype=torch.float32)


def _empty_output(x, spec, dtype):
    memory_format = torch.contiguous_format if contiguous_output(spec) else torch.preserve_format
    return torch.empty_like(x, dtype=dtype, memory_format=memory_format)


def _forward(x, weight, bias, eps, centered, weight_offset, rounding, functional, stats):
    spec = spec_from(weight, bias, eps, centered, weight_offset, rounding, functional)
    if plain(x, weight, bias) and refusal(x, weight, bias) is None:
        from ..kernels import launch

        y, rstd, mean = launch.norm_forward(x, weight, bias, spec, stats, contiguous_output(spec))
    else:
        y = _empty_output(x, spec, spec.output_dtype(x.dtype, None if weight is None else weight.dtype))
        y.copy_(reference_norm(x, weight, bias, spec))
        rstd, mean = reference_stats(x, spec) if stats else (None, None)
    return y, _none(x) if rstd is None else rstd, _none(x) if mean is None else mean


def _backward(dy, x, weight, bias, rstd, mean, eps, centered, weight_offset, rounding, functional, need):
    spec = spec_from(weight, bias, eps, centered, weight_offset, rounding, functional)
    if plain(x, weight, bias) and refusal(x, weight, bias) is None:
        from ..kernels import launch

        grads = launch.norm_backward(
            dy, x, weight, bias, rstd, mean if centered else None, spec, tuple(need), contiguous_output(spec)
        )
    else:
        dx, dweight, dbias = reference_backward(dy, x, weight, bias, spec, need)
        if dx is not None:
            dx = _empty_output(x, spec, x.dtype).copy_(dx)
        grads = (dx, dweight, dbias)
    return tuple(_none(x) if g is None else g for g in grads)


_library.impl("norm_forward", _forward, "CompositeExplicitAutograd")
_library.impl("norm_backward", _backward, "CompositeExplicitAutograd")


@torch.library.register_fake("hf_rmsnorm::norm_forward", lib=_library)
def _(x, weight, bias, eps, centered, weight_offset, rounding, functional, stats):
    spec = spec_from(weight, bias, eps, centered, weight_offset, rounding, functional)
    y = _empty_output(x, spec, spec.output_dtype(x.dtype, None if weight is None else weight.dtype))
    rows = math.prod(x.shape[:-1])  # torch.Size.numel() would fix a dynamic batch
    rstd = x.new_empty(rows, dtype=torch.float32) if stats else _none(x)
    return y, rstd, x.new_empty(rows, dtype=torch.float32) if stats and centered else _none(x)


@torch.library.register_fake("hf_rmsnorm::norm_backward", lib=_library)
def _(dy, x, weight, bias, rstd, mean, eps, centered, weight_offset, rounding, functional, need):
    spec = spec_from(weight, bias, eps, centered, weight_offset, rounding, functional)
    return (
        _empty_output(x, spec, x.dtype) if need[0] else _none(x),
        torch.empty_like(weight) if need[1] else _none(x),
        torch.empty_like(bias) if need[2] else _none(x),
    )

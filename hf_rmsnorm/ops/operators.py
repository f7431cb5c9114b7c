"""The registered operators: what `torch.compile`, `torch.export` and tensor subclasses
see of the kernels.
"""

import sys
from functools import lru_cache

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import assume_constant_result, is_compiling
from torch.library import Library, register_autograd, register_fake

from ..formula import NormSpec, dtype_of
from ..kernels.serves import unserved
from ..operands import ONE_PLUS, GradientOperands, of_norm, row_major
from ..reference import reference_backward, reference_norm, reference_stats
from ..rows import as_numbered, by_row, heads_of, row_order
from .launches import by_kernel, launches_of
from .norm_kinds import NormBackwardKind, NormForwardKind
from .plain import autograd_gradients

# The fields of `NormSpec`, but for groups, whose rows come apart. An integer is first:
# DTensor looks the placements of a call up by its arguments from an integer on.
_SPEC = (
    "int centered, float eps, bool has_weight, bool has_bias, float weight_offset, str rounding, bool functional, "
    "bool eps_outside, str gating"
)
_X = "Tensor x, Tensor? weight, Tensor? bias, Tensor? gate"
_library = Library("hf_rmsnorm", "DEF")
_library.define(f"norm_forward({_X}, {_SPEC}, bool stats) -> (Tensor, Tensor, Tensor)")
_library.define(
    f"norm_backward(Tensor dy, {_X}, Tensor rstd, Tensor mean, {_SPEC}, bool[] need)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)
norm_forward_op = torch.ops.hf_rmsnorm.norm_forward.default
norm_backward_op = torch.ops.hf_rmsnorm.norm_backward.default


def spec_args(spec: NormSpec) -> tuple:
    """A formula as the operators take it: all fields of one without groups, in order.

    Raises:
        TypeError: they do not compute it, as one in groups.
    """
    if unserved(spec, "rows") is not None:
        raise TypeError(f"the operators do not take {spec!r}")
    return (
        int(spec.centered),
        spec.eps,
        spec.has_weight,
        spec.has_bias,
        spec.weight_offset,
        spec.rounding,
        spec.functional,
        spec.eps_outside,
        spec.gate or "",
    )


@assume_constant_result
def load_sharding_rules() -> bool:
    """Register how DTensors are split, once one can exist: to load that takes long."""
    if "torch.distributed.tensor" in sys.modules:
        from . import sharding  # noqa: F401  registers on import
    return True


def is_dtensor(t) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)


@lru_cache(1_024)
def spec_from(centered: int, *fields) -> NormSpec:
    """The inverse of `spec_args`."""
    *others, gate = fields
    return NormSpec(bool(centered), *others, gate or None)


def _or_empty(x, *tensors: Tensor | None) -> list[Tensor]:
    """The tensors; an empty one for None, as all outputs of an operator are tensors."""
    return [x.new_empty(0, dtype=torch.float32) if t is None else t for t in tensors]


def _empty_output(x, spec: NormSpec, dtype: torch.dtype) -> Tensor:
    layout = torch.preserve_format
    if spec.functional:
        layout = torch.contiguous_format
    return torch.empty_like(x, dtype=dtype, memory_format=layout)


def _empty_result(x, weight, spec: NormSpec) -> Tensor:
    dtype = spec.output_dtype(x.dtype, dtype_of(weight))
    return _empty_output(x, spec, dtype)


def _forward(x, weight, bias, gate, *arguments):
    *formula, stats = arguments
    spec = spec_from(*formula)
    weight, bias = row_major(weight, bias)
    operands = of_norm(x, weight, bias, gate)
    made = by_kernel(launches_of(spec), NormForwardKind(stats), operands)
    if made is not None:
        _, y, *stats_of_rows = made
        order = row_order(x, spec, heads_of(weight, bias))
        return y, *_or_empty(x, *[by_row(t, x, order) for t in stats_of_rows])
    y = _empty_result(x, weight, spec)
    y.copy_(reference_norm(x, weight, bias, spec, gate))
    rstd = mean = None
    if stats:
        rstd, mean = reference_stats(x, spec, gate)
        rstd = rstd.view(x.shape[:-1])
        if mean is not None:
            mean = mean.view(x.shape[:-1])
    return y, *_or_empty(x, rstd, mean)


def _backward(dy, x, weight, bias, gate, rstd, mean, *arguments):
    *formula, need = arguments
    spec = spec_from(*formula)
    weight, bias = row_major(weight, bias)
    order = row_order(x, spec, heads_of(weight, bias))
    rstd = as_numbered(rstd, order)
    mean = as_numbered(mean, order) if spec.centered else None
    kind = NormBackwardKind(order, (*need, False), False)
    operands = GradientOperands(
        dy, x, weight, bias, gate, scale=None, dh=None, rstd=rstd, mean=mean
    )
    made = by_kernel(launches_of(spec), kind, operands)
    if made is not None:
        *grads, _ = made
    else:
        dx, *others, dgate = reference_backward(dy, x, weight, bias, spec, need, gate)
        dx = _laid_out(dx, x, spec)
        dgate = _laid_out(dgate, x, spec)
        grads = dx, *others, dgate
    return tuple(_or_empty(x, *grads))


def _laid_out(t: Tensor | None, x, spec: NormSpec) -> Tensor | None:
    """t in the strides of an output."""
    if t is None:
        return None
    return _empty_output(x, spec, t.dtype).copy_(t)


def _fake_forward(x, weight, bias, gate, *arguments):
    *formula, stats = arguments
    spec = spec_from(*formula)
    y = _empty_result(x, weight, spec)
    rstd = mean = None
    if stats:
        rstd = x.new_empty(x.shape[:-1], dtype=torch.float32)
        if spec.centered:
            mean = torch.empty_like(rstd)
    return y, *_or_empty(x, rstd, mean)


def _fake_backward(dy, x, weight, bias, gate, rstd, mean, *arguments):
    *formula, (need_x, need_weight, need_bias, need_gate) = arguments
    spec = spec_from(*formula)
    dx = dweight = dbias = dgate = None
    if need_x:
        dx = _empty_output(x, spec, x.dtype)
    if need_weight:
        dweight = torch.empty_like(weight)
    if need_bias:
        dbias = torch.empty_like(bias)
    if need_gate:
        dgate = _empty_output(x, spec, gate.dtype)
    return tuple(_or_empty(x, dx, dweight, dbias, dgate))


_library.impl("norm_forward", _forward, "CompositeExplicitAutograd")
_library.impl("norm_backward", _backward, "CompositeExplicitAutograd")
register_fake("hf_rmsnorm::norm_forward", _fake_forward, lib=_library)
register_fake("hf_rmsnorm::norm_backward", _fake_backward, lib=_library)


def _keep(ctx, inputs, output) -> None:
    operands = inputs[:4]
    ctx.formula = inputs[4:-1]
    ctx.save_for_backward(*operands, *output[1:])


def _gradients(ctx, dy, *_):
    """Those of the operator, in compiled code and of tensors that are not plain."""
    *operands, rstd, mean = ctx.saved_tensors
    need = ctx.needs_input_grad[:4]
    if is_compiling() or not is_grad_enabled():
        made = norm_backward_op(dy, *operands, rstd, mean, *ctx.formula, list(need))
        grads = [t if needed else None for t, needed in zip(made, need, strict=True)]
    else:
        spec = spec_from(*ctx.formula)
        operands = *operands, None
        need = *need, False
        *grads, _ = autograd_gradients(spec, ONE_PLUS, operands, dy, need)
    return *grads, *[None] * (len(ctx.formula) + 1)


register_autograd(
    "hf_rmsnorm::norm_forward", _gradients, setup_context=_keep, lib=_library
)

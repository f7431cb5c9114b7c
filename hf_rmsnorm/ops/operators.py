"""The registered operators: what `torch.compile`, `torch.export` and tensor subclasses see of the kernels."""

from __future__ import annotations

import sys

import torch

from ..formula import NormSpec
from ..kernels.plan import heads_of, row_order
from ..reference import reference_backward, reference_norm, reference_stats
from .backend import kernels, plain, refusal

# The integer is for DTensor, which looks the placements of a call up by its arguments from the first integer on.
_SPEC = (
    "float eps, int centered, float weight_offset, str rounding, bool functional, "
    "bool eps_outside, bool round_offset, bool weight_first, str gating"
)
_library = torch.library.Library("hf_rmsnorm", "DEF")
_library.define(
    f"norm_forward(Tensor x, Tensor? weight, Tensor? bias, Tensor? gate, {_SPEC}, bool stats) "
    "-> (Tensor, Tensor, Tensor)"
)
_library.define(
    "norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor? gate, Tensor? dh, Tensor rstd, "
    f"Tensor mean, {_SPEC}, bool[] need) -> (Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    f"add_norm_forward(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, {_SPEC}, bool stats) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
norm_forward_op = torch.ops.hf_rmsnorm.norm_forward.default
norm_backward_op = torch.ops.hf_rmsnorm.norm_backward.default
add_norm_forward_op = torch.ops.hf_rmsnorm.add_norm_forward.default


def spec_args(spec: NormSpec) -> tuple:
    """The fields of a spec as the operators take them."""
    return (
        spec.eps, int(spec.centered), spec.weight_offset, spec.rounding, spec.functional, spec.eps_outside,
        spec.round_offset, spec.weight_first, spec.gate or "",
    )  # fmt: skip


def spec_from(
    weight, bias, eps, centered, weight_offset, rounding, functional, eps_outside, round_offset, weight_first, gating
) -> NormSpec:
    return NormSpec(
        centered=bool(centered),
        eps=eps,
        has_weight=weight is not None,
        has_bias=bias is not None,
        weight_offset=weight_offset,
        rounding=rounding,
        functional=functional,
        eps_outside=eps_outside,
        round_offset=round_offset,
        weight_first=weight_first,
        gate=gating or None,
    )


def contiguous_output(spec: NormSpec) -> bool:
    """torch's own norms return row-major tensors; pointwise arithmetic keeps the order of its input's strides."""
    return spec.functional


@torch.compiler.assume_constant_result
def teach_dtensor() -> bool:
    """Register how DTensors are split, once one can exist."""
    if "torch.distributed.tensor" in sys.modules:
        from . import sharding  # noqa: F401  registers on import
    return True


def is_dtensor(t) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)


def _by_row(stats: torch.Tensor | None, x: torch.Tensor, spec: NormSpec, *parameters) -> torch.Tensor:
    """Statistics of the kernels, flat, in the shape of x's rows: whoever splits x can then split them alike."""
    if stats is None:
        return _none(x)
    order = row_order(x, contiguous_output(spec), heads_of(*parameters))
    if order is None:
        return stats.view(x.shape[:-1])
    own_order = sorted(range(len(order)), key=order.__getitem__)
    return stats.view([x.shape[d] for d in order]).permute(own_order).contiguous()


def _flat(stats: torch.Tensor, x: torch.Tensor, spec: NormSpec, *parameters) -> torch.Tensor:
    """`_by_row` undone; what is flat, as the direct launch keeps it, stays as it is."""
    if stats.dim() < 2:
        return stats.reshape(-1)
    order = row_order(x, contiguous_output(spec), heads_of(*parameters))
    return (stats if order is None else stats.permute(order)).reshape(-1)


def _none(t: torch.Tensor) -> torch.Tensor:
    return t.new_empty(0, dtype=torch.float32)


def _empty_output(x, spec, dtype):
    memory_format = torch.contiguous_format if contiguous_output(spec) else torch.preserve_format
    return torch.empty_like(x, dtype=dtype, memory_format=memory_format)


def _forward(x, weight, bias, gate, *formula):
    *fields, stats = formula
    spec = spec_from(weight, bias, *fields)
    if plain(x, weight, bias, gate) and refusal(x, weight, bias, spec, gate) is None:
        y, rstd, mean, _ = kernels().norm_forward(x, weight, bias, spec, stats, contiguous_output(spec), gate)
    else:
        y = _empty_output(x, spec, spec.output_dtype(x.dtype, None if weight is None else weight.dtype))
        y.copy_(reference_norm(x, weight, bias, spec, gate))
        rstd, mean = reference_stats(x, spec, weight, gate) if stats else (None, None)
        return y, *(_none(x) if t is None else t.view(x.shape[:-1]) for t in (rstd, mean))
    return y, *(_by_row(t, x, spec, weight, bias) for t in (rstd, mean))


def _add_forward(x, residual, weight, bias, *formula):
    *fields, stats = formula
    spec = spec_from(weight, bias, *fields)
    if plain(x, residual, weight, bias) and refusal(x, weight, bias, spec) is None:
        row_major = contiguous_output(spec)
        y, rstd, mean, h = kernels().norm_forward(x, weight, bias, spec, stats, row_major, None, residual)
        return h, y, *(_by_row(t, h, spec, weight, bias) for t in (rstd, mean))
    h = residual + x
    return h, *_forward(h, weight, bias, None, *formula)


def _backward(dy, x, weight, bias, gate, dh, rstd, mean, *formula):
    *fields, need = formula
    spec = spec_from(weight, bias, *fields)
    if plain(x, weight, bias, gate) and refusal(x, weight, bias, spec, gate) is None:
        rstd, mean = (_flat(t, x, spec, weight, bias) for t in (rstd, mean))
        mean = mean if spec.centered else None
        row_major = contiguous_output(spec)
        grads = kernels().norm_backward(dy, x, weight, bias, rstd, mean, spec, tuple(need), row_major, gate, dh)
    else:
        dx, dweight, dbias, dgate = reference_backward(dy, x, weight, bias, spec, need, gate)
        dx = dx if dx is None or dh is None else dh + dx
        dx, dgate = (g if g is None else _empty_output(x, spec, g.dtype).copy_(g) for g in (dx, dgate))
        grads = (dx, dweight, dbias, dgate)
    return tuple(_none(x) if g is None else g for g in grads)


_library.impl("norm_forward", _forward, "CompositeExplicitAutograd")
_library.impl("norm_backward", _backward, "CompositeExplicitAutograd")
_library.impl("add_norm_forward", _add_forward, "CompositeExplicitAutograd")


@torch.library.register_fake("hf_rmsnorm::norm_forward", lib=_library)
def _fake_forward(x, weight, bias, gate, *formula):
    *fields, stats = formula
    spec = spec_from(weight, bias, *fields)
    y = _empty_output(x, spec, spec.output_dtype(x.dtype, None if weight is None else weight.dtype))
    rows = x.shape[:-1]
    rstd = x.new_empty(rows, dtype=torch.float32) if stats else _none(x)
    return y, rstd, x.new_empty(rows, dtype=torch.float32) if stats and spec.centered else _none(x)


@torch.library.register_fake("hf_rmsnorm::add_norm_forward", lib=_library)
def _(x, residual, weight, bias, *formula):
    h = residual + x
    return h, *_fake_forward(h, weight, bias, None, *formula)


@torch.library.register_fake("hf_rmsnorm::norm_backward", lib=_library)
def _(dy, x, weight, bias, gate, dh, rstd, mean, *formula):
    *fields, need = formula
    spec = spec_from(weight, bias, *fields)
    return (
        _empty_output(x, spec, x.dtype) if need[0] else _none(x),
        torch.empty_like(weight) if need[1] else _none(x),
        torch.empty_like(bias) if need[2] else _none(x),
        _empty_output(x, spec, gate.dtype) if need[3] else _none(x),
    )


def as_saved(strides: tuple[int, ...], x: torch.Tensor, *rows: torch.Tensor | None) -> tuple:
    """What was saved, laid out as it was: x in `strides`, by which its rows are numbered, and the rest row-major.

    Hooks of saved tensors (`torch.autograd.graph.save_on_cpu`) may give tensors back with other strides.
    """
    if x.stride() != strides:
        x = torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)
    for t in rows:
        if t is not None and not t.is_contiguous():
            return x, *(t if t is None else t.contiguous() for t in rows)
    return x, *rows


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:4], *output[1:])
    ctx.formula, ctx.strides = inputs[4:-1], inputs[0].stride()


def _gradients(ctx, dy, *_):
    x, weight, bias, gate, rstd, mean = ctx.saved_tensors
    x, weight, bias, rstd, mean = as_saved(ctx.strides, x, weight, bias, rstd, mean)
    need = list(ctx.needs_input_grad[:4])
    grads = norm_backward_op(dy, x, weight, bias, gate, None, rstd, mean, *ctx.formula, need)
    wanted = [grad if needed else None for grad, needed in zip(grads, need, strict=True)]
    return *wanted, *[None] * (len(ctx.formula) + 1)


torch.library.register_autograd("hf_rmsnorm::norm_forward", _gradients, setup_context=_keep, lib=_library)

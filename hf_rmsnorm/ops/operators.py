"""The registered operators: what `torch.compile`, `torch.export` and tensor subclasses see of the kernels."""

from collections.abc import Callable
from types import NoneType
from typing import get_args, get_type_hints

import torch

from ..formula import NormSpec
from ..kernels.failure import KernelUnavailable
from ..kernels.rows import heads_of, row_order
from ..kernels.saved import Saved, require_saved, require_saved_of
from ..kernels.serves import unserved
from ..reference import (
    as_normed,
    reference_backward,
    reference_norm,
    reference_qk_backward,
    reference_qk_norm,
    reference_stats,
)
from .backend import give_up, qk_fits, refusal
from .direct import is_direct
from .loading import kernels, qk_kernels


def _argument_type(name: str, hint) -> str:
    kinds = get_args(hint) or (hint,)
    if name == "centered":  # for DTensor, which looks the placements of a call up by its arguments from an integer on
        return "int"
    found = next((kind.__name__ for kind in (bool, int, float) if kind in kinds), "str")
    return f"{found}?" if NoneType in kinds and found != "str" else found


# The formula as arguments: eps, `centered` and the rest. The operands themselves tell whether there are parameters, and
# rows come in their groups.
_HINTS = get_type_hints(NormSpec)
_TOLD = ("has_weight", "has_bias", "group_size")
_NAMES = dict.fromkeys(("eps", "centered", *(name for name in _HINTS if name not in _TOLD)))
_TYPES = {name: _argument_type(name, _HINTS[name]) for name in _NAMES}
_SPEC = ", ".join(f"{kind} {'gating' if name == 'gate' else name}" for name, kind in _TYPES.items())
_AFFINE = "Tensor? weight, Tensor? bias"
_OF_QK = "Tensor? q_weight, Tensor? k_weight, Tensor? q_bias, Tensor? k_bias"
_QK = f"Tensor q, Tensor k, {_OF_QK}, Tensor? cos, Tensor? sin"
_STATS = "Tensor rstd, Tensor mean"
_library = torch.library.Library("hf_rmsnorm", "DEF")


def _define(name: str, operands: str, last: str, outputs: int):
    _library.define(f"{name}({operands}, {_SPEC}, {last}) -> ({', '.join(['Tensor'] * outputs)})")
    return getattr(torch.ops.hf_rmsnorm, name).default


norm_forward_op = _define("norm_forward", f"Tensor x, {_AFFINE}, Tensor? gate", "bool stats", 3)
_OF_NORM = f"Tensor dy, Tensor x, {_AFFINE}, Tensor? gate, Tensor? dh, {_STATS}"
norm_backward_op = _define("norm_backward", _OF_NORM, "bool[] need", 4)
add_norm_forward_op = _define("add_norm_forward", f"Tensor x, Tensor residual, {_AFFINE}", "bool stats", 4)
qk_norm_forward_op = _define("qk_norm_forward", f"{_QK}, str way", "bool stats", 4)
qk_norm_backward_op = _define("qk_norm_backward", f"Tensor? dq, Tensor? dk, {_QK}, {_STATS}", "bool[] need", 6)


def spec_args(spec: NormSpec) -> tuple:
    """A formula as the operators take it; "" stands for a word that is None.

    Raises:
        TypeError: a formula in groups, or with fields of its own.
    """
    if type(spec) is not NormSpec or spec.group_size is not None:
        raise TypeError(f"the operators do not take {spec!r}")
    values = ((getattr(spec, name), kind) for name, kind in _TYPES.items())
    return tuple(int(v) if kind == "int" else "" if v is None and kind == "str" else v for v, kind in values)


def spec_from(weight: torch.Tensor | None, bias: torch.Tensor | None, arguments: tuple) -> tuple:
    """(the formula, what follows it) from the arguments behind an operator's tensors."""
    *values, last = arguments
    fields = {name: None if v == "" else v for name, v in zip(_TYPES, values, strict=True)}
    fields["centered"] = bool(fields["centered"])
    return NormSpec(has_weight=weight is not None, has_bias=bias is not None, **fields), last


def _by_row(stats: torch.Tensor | None, x: torch.Tensor, spec: NormSpec, *parameters) -> torch.Tensor:
    """Statistics of the kernels, flat, in the shape of x's rows: whoever splits x can then split them alike."""
    if stats is None:
        return _none(x)
    order = row_order(x, spec, heads_of(*parameters))
    if order is None:
        return stats.view(x.shape[:-1])
    own_order = sorted(range(len(order)), key=order.__getitem__)
    return stats.view([x.shape[d] for d in order]).permute(own_order).contiguous()


def _flat(stats: torch.Tensor, x: torch.Tensor, spec: NormSpec, *parameters) -> torch.Tensor:
    """`_by_row` undone; what is flat, as the direct launch keeps it, stays as it is."""
    if stats.dim() < 2:
        return stats.reshape(-1)
    order = row_order(x, spec, heads_of(*parameters))
    return (stats if order is None else stats.permute(order)).reshape(-1)


def _none(t: torch.Tensor) -> torch.Tensor:
    """What an operator, whose outputs are all tensors, returns for none."""
    return t.new_empty(0, dtype=torch.float32)


def _empty_output(x, spec, dtype):
    memory_format = torch.contiguous_format if spec.functional else torch.preserve_format
    return torch.empty_like(x, dtype=dtype, memory_format=memory_format)


def _unless_unavailable(launch: Callable, device: torch.device, *operands):
    """``launch(*operands)``, or None where the kernels turn out not to be loadable."""
    try:
        return launch(*operands)
    except KernelUnavailable as error:
        give_up(error, device)
        return None


def _forward(x, weight, bias, gate, *formula):
    spec, stats = spec_from(weight, bias, formula)
    made = None
    if is_direct(x, weight, bias, gate) and refusal(x, weight, bias, spec, gate) is None:
        made = _unless_unavailable(_launch_norm, x.device, x, weight, bias, spec, stats, gate)
    if made is None:
        y = _empty_output(x, spec, spec.output_dtype(x.dtype, None if weight is None else weight.dtype))
        y.copy_(reference_norm(x, weight, bias, spec, gate))
        rstd, mean = reference_stats(x, spec, gate) if stats else (None, None)
        return y, *(_none(x) if t is None else t.view(x.shape[:-1]) for t in (rstd, mean))
    y, rstd, mean, _ = made
    return y, *(_by_row(t, x, spec, weight, bias) for t in (rstd, mean))


def _launch_norm(*operands):
    return kernels().norm_forward(*operands)


def _add_forward(x, residual, weight, bias, *formula):
    spec, stats = spec_from(weight, bias, formula)
    refused = unserved(spec, "residual sum") or refusal(x, weight, bias, spec)
    if refused is None and is_direct(x, residual, weight, bias):
        made = _unless_unavailable(_launch_norm, x.device, x, weight, bias, spec, stats, None, residual)
        if made is not None:
            y, rstd, mean, h = made
            return h, y, *(_by_row(t, h, spec, weight, bias) for t in (rstd, mean))
    h = residual + x
    return h, *_forward(h, weight, bias, None, *formula)


def _backward(dy, x, weight, bias, gate, dh, rstd, mean, *formula):
    spec, need = spec_from(weight, bias, formula)
    rows, parameters = {"x": x, "gate": gate, "dh": dh}, {"weight": weight, "bias": bias}
    require_saved_of(dy, rows, parameters, {"rstd": rstd, "mean": mean if spec.centered else None})
    weight, bias = (t if t is None else t.contiguous() for t in (weight, bias))
    grads = None
    if is_direct(x, weight, bias, gate) and refusal(x, weight, bias, spec, gate) is None:
        rstd, mean = (_flat(t, x, spec, weight, bias) for t in (rstd, mean))
        mean = mean if spec.centered else None
        operands = dy, x, weight, bias, rstd, mean, spec, tuple(need), gate, dh
        grads = _unless_unavailable(_launch_norm_backward, x.device, *operands)
    if grads is None:
        dx, dweight, dbias, dgate = reference_backward(dy, x, weight, bias, spec, need, gate)
        dx = dx if dx is None or dh is None else dh + dx
        dx, dgate = (g if g is None else _empty_output(x, spec, g.dtype).copy_(g) for g in (dx, dgate))
        grads = (dx, dweight, dbias, dgate)
    return tuple(_none(x) if g is None else g for g in grads)


def _launch_norm_backward(*operands):
    return kernels().norm_backward(*operands)


def _qk_served(q, k, parameters, cos, sin, spec) -> bool:
    return (
        is_direct(q, k, *parameters, cos, sin)
        and qk_fits(q, k, parameters, spec, cos, sin)
        and refusal(as_normed(q, parameters[0]), parameters[0], parameters[2], spec) is None
    )


def _qk_forward(q, k, q_weight, k_weight, q_bias, k_bias, cos, sin, way, *formula):
    parameters = q_weight, k_weight, q_bias, k_bias
    spec, stats = spec_from(q_weight, q_bias, formula)
    made = None
    if _qk_served(q, k, parameters, cos, sin, spec):
        made = _unless_unavailable(_launch_qk, q.device, q, k, parameters, cos, sin, spec, stats, way)
    if made is not None:
        yq, yk, rstd, mean = made
    else:
        yq, yk = reference_qk_norm(q, k, q_weight, k_weight, spec, cos, sin, q_bias, k_bias, way)
        rstd = mean = None
        if stats:  # rows in the order of the kernels: heads fastest
            rstd, mean = zip(*(_qk_stats(x, w, spec) for x, w in ((q, q_weight), (k, k_weight))), strict=True)
            rstd, mean = torch.cat(rstd), torch.cat(mean) if spec.centered else None
    return yq, yk, *(_none(q) if t is None else t for t in (rstd, mean))


def _launch_qk(*operands):
    return qk_kernels().qk_norm_forward(*operands)


def _qk_stats(x, weight, spec):
    """One for each head, also where it is one for all heads of a token."""
    of_heads = as_normed(x, weight).dim() == 4
    stats = reference_stats(x.transpose(1, 2) if of_heads else as_normed(x, weight), spec)
    return stats if of_heads else tuple(t if t is None else t.repeat_interleave(x.shape[1]) for t in stats)


def _qk_backward(dq, dk, q, k, q_weight, k_weight, q_bias, k_bias, cos, sin, rstd, mean, *formula):
    parameters = q_weight, k_weight, q_bias, k_bias
    spec, need = spec_from(q_weight, q_bias, formula)
    _require_saved_heads(q, k, dq, dk, rstd)
    grads = None
    if _qk_served(q, k, parameters, cos, sin, spec) and is_direct(dq, dk):
        operands = dq, dk, q, k, parameters, cos, sin, rstd, mean, spec, tuple(need)
        grads = _unless_unavailable(_launch_qk_backward, q.device, *operands)
    if grads is None:
        grads = list(reference_qk_backward(dq, dk, q, k, *parameters, cos, sin, spec, need))
        grads[:2] = (g if g is None else torch.empty_like(x).copy_(g) for g, x in zip(grads, (q, k), strict=False))
    return tuple(_none(q) if g is None else g for g in grads)


def _launch_qk_backward(dq, dk, q, k, parameters, cos, sin, rstd, mean, spec, need):
    if not rstd.numel():  # of DTensors, whose forward kept none
        *_, rstd, mean = _launch_qk(q, k, parameters, cos, sin, spec, True)
    mean = mean if spec.centered else None
    return qk_kernels().qk_norm_backward(dq, dk, q, k, parameters, cos, sin, rstd, mean, spec, need)


def _require_saved_heads(q, k, dq, dk, rstd) -> None:
    like_q, like_k = (x if d is None else d for x, d in ((q, dq), (k, dk)))
    rows = (like_q.numel() + like_k.numel()) // max(1, like_q.shape[-1])
    expected = Saved("q", like_q.shape), Saved("k", like_k.shape), Saved("rstd", (rows,))
    require_saved(q.device, expected, (q, k, rstd if rstd.numel() else None))  # DTensors keep no statistics


def _fake_forward(x, weight, bias, gate, *formula):
    spec, stats = spec_from(weight, bias, formula)
    y = _empty_output(x, spec, spec.output_dtype(x.dtype, None if weight is None else weight.dtype))
    rows = x.shape[:-1]
    rstd = x.new_empty(rows, dtype=torch.float32) if stats else _none(x)
    return y, rstd, x.new_empty(rows, dtype=torch.float32) if stats and spec.centered else _none(x)


def _fake_add_forward(x, residual, weight, bias, *formula):
    h = residual + x
    return h, *_fake_forward(h, weight, bias, None, *formula)


def _fake_backward(dy, x, weight, bias, gate, dh, rstd, mean, *formula):
    spec, need = spec_from(weight, bias, formula)
    return (
        _empty_output(x, spec, x.dtype) if need[0] else _none(x),
        torch.empty_like(weight) if need[1] else _none(x),
        torch.empty_like(bias) if need[2] else _none(x),
        _empty_output(x, spec, gate.dtype) if need[3] else _none(x),
    )


def _fake_qk_forward(q, k, q_weight, k_weight, q_bias, k_bias, cos, sin, way, *formula):
    spec, stats = spec_from(q_weight, q_bias, formula)
    rows = q.shape[0] * q.shape[2] * (q.shape[1] + k.shape[1])
    rstd = q.new_empty(rows, dtype=torch.float32) if stats else _none(q)
    mean = q.new_empty(rows, dtype=torch.float32) if stats and spec.centered else _none(q)
    return *reference_qk_norm(q, k, q_weight, k_weight, spec, cos, sin, q_bias, k_bias, way), rstd, mean


def _fake_qk_backward(dq, dk, q, k, q_weight, k_weight, q_bias, k_bias, cos, sin, rstd, mean, *formula):
    need = formula[-1]
    grads = zip((q, k, q_weight, k_weight, q_bias, k_bias), (dq, dk) * 3, need, strict=True)
    return tuple(torch.empty_like(t) if n and d is not None else _none(q) for t, d, n in grads)


for _name, _implementation, _fake in (
    ("norm_forward", _forward, _fake_forward),
    ("norm_backward", _backward, _fake_backward),
    ("add_norm_forward", _add_forward, _fake_add_forward),
    ("qk_norm_forward", _qk_forward, _fake_qk_forward),
    ("qk_norm_backward", _qk_backward, _fake_qk_backward),
):
    _library.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hf_rmsnorm::{_name}", _fake, lib=_library)


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


def qk_as_saved(tensors: tuple) -> tuple:
    """The same for queries and keys: columns of unit stride and parameters without gaps, as the kernels read them."""
    parameters, (cos, sin) = tensors[2:6], tensors[6:8]
    in_place = all(t is None or t.stride(-1) == 1 for t in tensors)
    in_place = in_place and all(t is None or t.is_contiguous() for t in parameters)
    if in_place and (cos is None or cos.stride() == sin.stride()):
        return tensors
    return tuple(t if t is None else t.contiguous() for t in tensors)


def wanted(grads, need) -> list:
    """The gradients that are needed; an operator returns tensors for the others too."""
    return [grad if needed else None for grad, needed in zip(grads, need, strict=True)]


def _keep(ctx, inputs, output):
    tensors = len(inputs) - len(_TYPES) - 1
    ctx.save_for_backward(*(t for t in inputs[:tensors] if not isinstance(t, str)), *output[-2:])
    ctx.formula, ctx.strides = inputs[tensors:-1], inputs[0].stride()


def _gradients(ctx, dy, *_):
    x, weight, bias, gate, rstd, mean = ctx.saved_tensors
    x, weight, bias, rstd, mean = as_saved(ctx.strides, x, weight, bias, rstd, mean)
    need = list(ctx.needs_input_grad[:4])
    grads = norm_backward_op(dy, x, weight, bias, gate, None, rstd, mean, *ctx.formula, need)
    return *wanted(grads, need), *[None] * (len(ctx.formula) + 1)


def _qk_gradients(ctx, dq, dk, *_):
    need = list(ctx.needs_input_grad[:6])
    grads = qk_norm_backward_op(dq, dk, *qk_as_saved(ctx.saved_tensors), *ctx.formula, need)
    return *wanted(grads, need), *[None] * (len(ctx.formula) + 4)


torch.library.register_autograd("hf_rmsnorm::norm_forward", _gradients, setup_context=_keep, lib=_library)
torch.library.register_autograd("hf_rmsnorm::qk_norm_forward", _qk_gradients, setup_context=_keep, lib=_library)

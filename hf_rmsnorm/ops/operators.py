"""The registered operators: what `torch.compile`, `torch.export` and tensor subclasses
see of the kernels.
"""

from functools import lru_cache
from types import NoneType
from typing import get_args, get_type_hints

import torch

from ..formula import NormSpec
from ..kernels.failure import KernelUnavailable
from ..kernels.rows import heads_of, row_order
from ..kernels.saved import require_saved_of
from ..reference import reference_backward, reference_norm, reference_stats
from .backend import give_up, why_not
from .direct import is_direct
from .launches import is_aligned, key_of, launches_of
from .loading import backward_kernels, kernels


def _argument_type(name: str, hint) -> str:
    kinds = get_args(hint) or (hint,)
    if name == "centered":
        # for DTensor, which looks the placements of a call up by its arguments from an
        # integer on
        return "int"
    found = next((kind.__name__ for kind in (bool, int, float) if kind in kinds), "str")
    return f"{found}?" if NoneType in kinds and found != "str" else found


# The formula as arguments: eps, `centered` and the rest. The operands themselves tell
# whether there are parameters, and rows come in their groups.
_HINTS = get_type_hints(NormSpec)
_TOLD = ("has_weight", "has_bias", "group_size")
_NAMES = dict.fromkeys(
    ("eps", "centered", *(name for name in _HINTS if name not in _TOLD))
)
_TYPES = {name: _argument_type(name, _HINTS[name]) for name in _NAMES}
_SPEC = ", ".join(
    f"{kind} {'gating' if name == 'gate' else name}" for name, kind in _TYPES.items()
)
_AFFINE = "Tensor? weight, Tensor? bias"
_STATS = "Tensor rstd, Tensor mean"
_library = torch.library.Library("hf_rmsnorm", "DEF")


def _define(name: str, operands: str, last: str, outputs: int):
    _library.define(
        f"{name}({operands}, {_SPEC}, {last}) -> ({', '.join(['Tensor'] * outputs)})"
    )
    return getattr(torch.ops.hf_rmsnorm, name).default


norm_forward_op = _define(
    "norm_forward", f"Tensor x, {_AFFINE}, Tensor? gate", "bool stats", 3
)
_OF_NORM = f"Tensor dy, Tensor x, {_AFFINE}, Tensor? gate, Tensor? dh, {_STATS}"
norm_backward_op = _define("norm_backward", _OF_NORM, "bool[] need", 4)


def spec_args(spec: NormSpec) -> tuple:
    """A formula as the operators take it; "" means None.

    Raises:
        TypeError: a formula in groups, or of a subclass with more fields.
    """
    if type(spec) is not NormSpec or spec.group_size is not None:
        raise TypeError(f"the operators do not take {spec!r}")
    values = ((getattr(spec, name), kind) for name, kind in _TYPES.items())
    return tuple(
        int(v) if kind == "int" else "" if v is None and kind == "str" else v
        for v, kind in values
    )


def spec_from(
    weight: torch.Tensor | None, bias: torch.Tensor | None, arguments: tuple
) -> tuple:
    """(the formula, what follows it) from the arguments behind an operator's tensors."""
    *values, last = arguments
    return _spec_from(weight is not None, bias is not None, tuple(values)), last


@lru_cache(1_024)
def _spec_from(has_weight: bool, has_bias: bool, values: tuple) -> NormSpec:
    fields = {
        name: None if v == "" else v for name, v in zip(_TYPES, values, strict=True)
    }
    fields["centered"] = bool(fields["centered"])
    return NormSpec(has_weight=has_weight, has_bias=has_bias, **fields)


def _by_row(
    stats: torch.Tensor | None, x: torch.Tensor, spec: NormSpec, *parameters
) -> torch.Tensor:
    """The kernels' flat statistics in the shape of x's rows, so that both can be split
    in the same way.
    """
    if stats is None:
        return _none(x)
    order = row_order(x, spec, heads_of(*parameters))
    if order is None:
        return stats.view(x.shape[:-1])
    own_order = sorted(range(len(order)), key=order.__getitem__)
    return stats.view([x.shape[d] for d in order]).permute(own_order).contiguous()


def _flat(
    stats: torch.Tensor, x: torch.Tensor, spec: NormSpec, *parameters
) -> torch.Tensor:
    """The inverse of `_by_row`. Flat statistics, as a direct launch saves them, are
    returned unchanged.
    """
    if stats.dim() < 2:
        return stats.reshape(-1)
    order = row_order(x, spec, heads_of(*parameters))
    return (stats if order is None else stats.permute(order)).reshape(-1)


def _none(t: torch.Tensor) -> torch.Tensor:
    """What an operator, whose outputs are all tensors, returns for none."""
    return t.new_empty(0, dtype=torch.float32)


def _empty_output(x, spec, dtype):
    memory_format = (
        torch.contiguous_format if spec.functional else torch.preserve_format
    )
    return torch.empty_like(x, dtype=dtype, memory_format=memory_format)


def _forward(x, weight, bias, gate, *formula):
    spec, stats = spec_from(weight, bias, formula)
    made = launched_forward(x, weight, bias, gate, spec, stats)
    if made is not None:
        y, rstd, mean, _ = made
        return y, *(_by_row(t, x, spec, weight, bias) for t in (rstd, mean))
    y = _empty_output(
        x, spec, spec.output_dtype(x.dtype, None if weight is None else weight.dtype)
    )
    y.copy_(reference_norm(x, weight, bias, spec, gate))
    rstd, mean = reference_stats(x, spec, gate) if stats else (None, None)
    return y, *(_none(x) if t is None else t.view(x.shape[:-1]) for t in (rstd, mean))


def launched_forward(
    x, weight, bias, gate, spec: NormSpec, stats: bool
) -> tuple | None:
    """(y, rstd, mean, None) by a kernel; None where none serves the call."""
    if (
        not is_direct(x, weight, bias, gate)
        or why_not(spec, x, weight, bias, gate) is not None
    ):
        return None
    weight, bias = (t if t is None else t.contiguous() for t in (weight, bias))
    operands = x, weight, bias, gate, None, None, None
    launches, key = launches_of(spec), key_of(("forward", stats), operands)
    try:
        launch = launches.kept.get(key) or launches.keep(
            key, kernels().NormForward(spec, operands, is_aligned(key), stats)
        )
        return launch.launch(*operands)
    except KernelUnavailable as error:
        give_up(error, x.device)
        return None


def _backward(dy, x, weight, bias, gate, dh, rstd, mean, *formula):
    spec, need = spec_from(weight, bias, formula)
    rows, parameters = (
        {"x": x, "gate": gate, "dh": dh},
        {"weight": weight, "bias": bias},
    )
    require_saved_of(
        dy, rows, parameters, {"rstd": rstd, "mean": mean if spec.centered else None}
    )
    weight, bias = (t if t is None else t.contiguous() for t in (weight, bias))
    stats = (
        _flat(rstd, x, spec, weight, bias),
        _flat(mean, x, spec, weight, bias) if spec.centered else None,
    )
    grads = launched_backward(
        (dy, x, weight, bias, gate, dh, *stats), spec, tuple(need)
    )
    if grads is None:
        dx, dweight, dbias, dgate = reference_backward(
            dy, x, weight, bias, spec, need, gate
        )
        dx = dx if dx is None or dh is None else dh + dx
        dx, dgate = (
            g if g is None else _empty_output(x, spec, g.dtype).copy_(g)
            for g in (dx, dgate)
        )
        grads = (dx, dweight, dbias, dgate)
    return tuple(_none(x) if g is None else g for g in grads)


def launched_backward(operands: tuple, spec: NormSpec, need: tuple) -> tuple | None:
    """(dx, dweight, dbias, dgate) by the kernels; None where none serves the call."""
    dy, x, weight, bias, gate, dh, _, _ = operands
    if (
        not is_direct(dy, x, weight, bias, gate, dh)
        or why_not(spec, x, weight, bias, gate) is not None
    ):
        return None
    launches, key = (
        launches_of(spec),
        key_of(("backward", need), operands[:6], operands[6:]),
    )
    try:
        launch = launches.kept.get(key)
        if launch is None:
            launch = launches.keep(
                key,
                backward_kernels().NormBackward(spec, operands, is_aligned(key), need),
            )
        return launch.launch(*operands)
    except KernelUnavailable as error:
        give_up(error, x.device)
        return None


def _fake_forward(x, weight, bias, gate, *formula):
    spec, stats = spec_from(weight, bias, formula)
    y = _empty_output(
        x, spec, spec.output_dtype(x.dtype, None if weight is None else weight.dtype)
    )
    rows = x.shape[:-1]
    rstd = x.new_empty(rows, dtype=torch.float32) if stats else _none(x)
    return (
        y,
        rstd,
        x.new_empty(rows, dtype=torch.float32) if stats and spec.centered else _none(x),
    )


def _fake_backward(dy, x, weight, bias, gate, dh, rstd, mean, *formula):
    spec, need = spec_from(weight, bias, formula)
    return (
        _empty_output(x, spec, x.dtype) if need[0] else _none(x),
        torch.empty_like(weight) if need[1] else _none(x),
        torch.empty_like(bias) if need[2] else _none(x),
        _empty_output(x, spec, gate.dtype) if need[3] else _none(x),
    )


for _name, _implementation, _fake in (
    ("norm_forward", _forward, _fake_forward),
    ("norm_backward", _backward, _fake_backward),
):
    _library.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hf_rmsnorm::{_name}", _fake, lib=_library)


def by_operator(spec: NormSpec, saved: tuple, dy, dh, need) -> list:
    """(dx, dweight, dbias, dgate) by the registered operator; None for those that are
    not needed.
    """
    *operands, rstd, mean = saved
    mean = rstd.new_empty(0) if mean is None else mean
    grads = norm_backward_op(
        dy, *operands, dh, rstd, mean, *spec_args(spec), list(need)
    )
    return [grad if needed else None for grad, needed in zip(grads, need, strict=True)]


def register_gradients(gradients) -> None:
    """Make autograd of the operator call ``gradients(spec, saved, strides, dy, need)``.

    saved is (x, weight, bias, gate, rstd, mean), and x had these strides.
    """

    def keep(ctx, inputs, output):
        tensors = len(inputs) - len(_TYPES) - 1
        ctx.save_for_backward(*inputs[:tensors], *output[-2:])
        ctx.formula, ctx.strides = inputs[tensors:], inputs[0].stride()

    def backward(ctx, dy, *_):
        _, weight, bias, *_ = saved = ctx.saved_tensors
        spec, _ = spec_from(weight, bias, ctx.formula)
        grads = gradients(spec, saved, ctx.strides, dy, tuple(ctx.needs_input_grad[:4]))
        return *grads, *[None] * len(ctx.formula)

    torch.library.register_autograd(
        "hf_rmsnorm::norm_forward", backward, setup_context=keep, lib=_library
    )

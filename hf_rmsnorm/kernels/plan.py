"""What a launch depends on besides the tensors' memory, worked out once per shape, strides, dtypes and formula."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..formula import NormSpec
from . import backward, forward
from .compiled import BoundKernel, Kernel
from .rows import RowAddress, flat_strides, heads_of, row_order
from .saved import Saved, saved_of_rows
from .serves import require
from .sizes import backward_config, forward_config, reduce_config

_FORWARD = ("X", "W", "B", "G", "SHIFT", "FACTOR", "RES", "H", "Y", "RSTD", "MEAN", "eps")
_BACKWARD = ("DY", "X", "W", "B", "G", "DH", "RSTD", "MEAN", "DX", "DW", "DB", "DG", "eps")
NORM_FORWARD = Kernel(forward.norm_forward, _FORWARD)
NORM_BACKWARD = Kernel(backward.norm_backward, _BACKWARD, contracts=True)
REDUCE_PARTIALS = Kernel(backward.reduce_partials, ("PARTIALS", "OUT"))
KERNELS = (NORM_FORWARD, NORM_BACKWARD, REDUCE_PARTIALS)

_PLANS_KEPT = 8_192  # a plan is some hundred bytes; generation with a growing prompt makes one per length
_plans: dict = {}
forget = _plans.clear


@dataclass(frozen=True)
class ForwardPlan:
    """One forward launch, without statistics or with.

    `other` is the second operand of x's shape, a gate, or else a residual; `alone` says that x and the weight are all
    that is read. `sum_dtype` and `sum_strides` are those of residual + x, and `keeps_sum` says that it is rounded and
    returned. `blank` has the shape and dtype of a statistic. `in_place` says that nothing is copied, neither operands
    nor outputs. `backward` holds the plans of backwards of such calls, and `serve` what launches it, without statistics
    and with. `saved` is what a backward expects of x (or the sum), weight, bias, gate, rstd and mean. `last` is what
    was asked of the last backward, what tells that operands are like those, and what launches it for them.
    """

    launch: BoundKernel
    shape: torch.Size
    rows: int
    centered: bool
    order: tuple[int, ...] | None
    x: RowAddress
    other: RowAddress
    alone: bool
    blank: torch.Tensor
    output_dtype: torch.dtype
    memory_format: torch.memory_format
    output_like_input: bool
    flat_output: bool
    sum_dtype: torch.dtype
    keeps_sum: bool
    sum_strides: tuple[int, ...] | None
    sum_like_input: bool
    flat_sum: bool
    in_place: bool
    saved: tuple[Saved | None, ...]
    backward: dict
    serve: list
    last: list


@dataclass(frozen=True)
class BackwardPlan:
    """One backward: `launch` for all that is needed, but for what a launch of its own sums, `sums_launch`.

    `other` is the gate, or the gradient that is added to dx. `reads_bias` says that the bias is read. `partials` has
    the shape of the parameters' partial sums, and `sums` what adds them up, of the weight and of the bias. `serve` is
    what launches it all, by what is needed.
    """

    launch: BoundKernel
    sums_launch: BoundKernel | None
    rows: int
    order: tuple[int, ...] | None
    x: RowAddress
    dy: RowAddress
    other: RowAddress
    memory_format: torch.memory_format
    flat_output: bool
    in_place: bool
    reads_bias: bool
    partials: torch.Tensor
    sums: tuple[BoundKernel, BoundKernel]
    serve: dict


def remember(key: tuple, make: Callable):
    """The plan of this key, made where there is none yet."""
    plan = _plans.get(key)
    if plan is None:
        plan = make()
        if len(_plans) >= _PLANS_KEPT:
            _plans.clear()
        _plans[key] = plan
    return plan


def _layout(x: torch.Tensor, spec: NormSpec, weight: torch.Tensor | None, heads: int):
    """(order in which rows are numbered, memory format of the output, whether that output is flat in this order)."""
    if spec.functional:
        return None, torch.contiguous_format, True
    order = row_order(x, spec, heads)
    output = _empty_like(x)
    with _disable_current_modes():
        if heads > 1 and weight is not None:  # such a weight has a say in the order of their product
            product = torch.empty_like(weight, device="meta") * output
            if product.is_contiguous():
                return order, torch.contiguous_format, True
    return order, torch.preserve_format, flat_strides(tuple(x.shape), output.stride(), order)


def _empty_like(x: torch.Tensor) -> torch.Tensor:
    with _disable_current_modes():  # what eager's strides would be is our question, not an operator of the caller's
        return torch.empty_like(x, device="meta")


@cache
def _element(device: torch.device) -> torch.Tensor:
    return torch.empty(1, dtype=torch.float32, device=device)


def _blank(device: torch.device, *shape: int) -> torch.Tensor:
    """A tensor of float32 in the memory of one element: ``empty_like`` it is the quickest way to one of this shape."""
    with _disable_current_modes(), torch.inference_mode(False):
        return _element(device).expand(shape)


def _sum_of(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """residual + x without its data: what is asked of it is its strides."""
    with _disable_current_modes():
        both = (torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in (residual, x))
        return torch.add(*both)


def formula_constants(spec: NormSpec, weight: torch.Tensor | None) -> dict:
    """The constants that every kernel takes; where the weight is float32, rounding to its dtype rounds nothing."""
    nothing = spec.rounding == "weight_dtype" and weight.dtype == torch.float32
    return {
        "CENTERED": spec.centered, "OFFSET": spec.weight_offset, "ROUND_OFFSET": spec.rounds_offset,
        "ROUNDING": "once" if nothing else spec.rounding, "EPS_OUTSIDE": spec.eps_outside,
    }  # fmt: skip


def _dtype(t: torch.Tensor | None) -> torch.dtype | None:
    return None if t is None else t.dtype


def _gate(spec: NormSpec, gate: torch.Tensor | None) -> str | None:
    """What becomes of the second operand, which without a gate in the formula is the scale of a modulation."""
    return "modulate_after" if spec.gate is None and gate is not None else spec.gate


def forward_plan(x, weight, bias, gate, spec: NormSpec, residual=None, keep_sum=True, shift=None, factor=None):
    """The launch of `spec` on tensors like these; none of their values is read.

    keep_sum: residual + x is rounded, and returned too. gate, shift, factor: as in `launch.norm_forward`.

    Raises:
        NotImplementedError: no kernel computes this formula.
    """
    heads = heads_of(weight, bias)
    dtypes = (x.device, x.dtype, *map(_dtype, (weight, bias, gate, residual, shift, factor)))
    shapes = x.shape, *(None if t is None else t.shape for t in (weight, bias))
    other = residual if gate is None else gate

    def make() -> ForwardPlan:
        hidden_size, rows = x.shape[-1], math.prod(x.shape[:-1])
        require(spec, "rows", *(() if residual is None else ("residual sum",)))
        total = x if residual is None else _sum_of(x, residual)
        order, memory_format, flat_output = _layout(total, spec, weight, heads)
        x_rows, other_rows = RowAddress.of(x, order), RowAddress.of(other, order)
        flat = x_rows.flat(rows, hidden_size) and other_rows.flat(rows, hidden_size)
        config, output_dtype = forward_config(hidden_size), spec.output_dtype(total.dtype, _dtype(weight))
        named = {
            "N": hidden_size, "BLOCK": config.block, **formula_constants(spec, weight),
            **x_rows.arguments("x"), **other_rows.arguments("other"), "rows_total": rows,
            "ROWS": config.rows, "HEADS": heads, "GATE": _gate(spec, gate),
            "FLAT": hidden_size if flat else 0,
        }  # fmt: skip
        grid = (-(-rows // (config.rows * heads)), heads, 1)
        keys = ((*dtypes, output_dtype, keep_sum, stats) for stats in (False, True))
        flat_sum = flat_strides(tuple(x.shape), total.stride(), order)
        read_again = {"x" if residual is None else "residual + x": total, "weight": weight, "bias": bias}
        read_again["scale" if spec.gate is None else "gate"] = gate
        return ForwardPlan(
            launch=NORM_FORWARD.bind(grid, config.num_warps, named, *keys), shape=x.shape, rows=rows,
            centered=spec.centered, order=order, x=x_rows, other=other_rows,
            alone=all(t is None for t in (bias, gate, residual, shift, factor)), blank=_blank(x.device, rows),
            output_dtype=output_dtype,
            memory_format=memory_format, flat_output=flat_output, sum_dtype=total.dtype, flat_sum=flat_sum,
            output_like_input=output_dtype == total.dtype and memory_format == torch.preserve_format,
            keeps_sum=keep_sum, sum_strides=None if residual is None else total.stride(),
            sum_like_input=total.dtype == x.dtype and total.stride() == _empty_like(x).stride(),
            in_place=not (x_rows.copy or other_rows.copy) and flat_output and (residual is None or flat_sum),
            saved=saved_of_rows(read_again, rows), backward={}, serve=[None, None], last=[(None, None, None)],
        )  # fmt: skip

    strides = x.stride(), None if other is None else other.stride()
    return remember(("forward", shapes, strides, dtypes, spec.but_eps, keep_sum), make)


def backward_plan(
    dy, x, weight, bias, gate, spec: NormSpec, need: tuple[bool, ...], limits: tuple[int, int], dh=None,
    from_output: bool = False,
) -> BackwardPlan:  # fmt: skip
    """The backward of `spec`; limits: (multiprocessors, bytes of shared memory a program may use).

    from_output: x is the norm's output.

    Raises:
        NotImplementedError: as `forward_plan`.
    """
    heads = heads_of(weight, bias)
    need = (*need, False)[:4]
    dtypes = (x.device, dy.dtype, x.dtype, *map(_dtype, (weight, bias, gate, dh)), need)
    other = gate if dh is None else dh

    def make() -> BackwardPlan:
        hidden_size, rows = x.shape[-1], math.prod(x.shape[:-1])
        require(spec, "rows", *(("from the output",) if from_output else ()))
        sms, shared = limits
        order, memory_format, flat_output = _layout(x, spec, weight, heads)
        x_rows, dy_rows, other_rows = operands = [RowAddress.of(t, order) for t in (x, dy, other)]
        after = (_gate(spec, gate) or "").endswith("_after")
        shift = bias if from_output or (after and need[3]) else None  # where its values are read
        itemsize = max(t.element_size() for t in (x, dy, weight, shift, other) if t is not None)
        config = backward_config(
            hidden_size, spec.centered, itemsize, shared, gate is not None, dh is not None, shift is not None,
            from_output, weight is not None and weight.dtype != x.dtype,
        )  # fmt: skip
        flat = config.flat and all(operand.flat(rows, hidden_size) for operand in operands)
        parts = max(1, min(-(-rows // (config.rows * heads)), sms * config.programs_per_sm // heads))
        named = {
            "N": hidden_size, "BLOCK": config.block, "ROWS": config.rows, "HEADS": heads, "rows_total": rows,
            **x_rows.arguments("x"), **dy_rows.arguments("dy"), **other_rows.arguments("other"),
            **formula_constants(spec, weight), "GATE": _gate(spec, gate),
            "STAGES": config.stages, "RELOAD_W": config.reload_weight, "GAPS": config.gaps,
            "FLAT": hidden_size if flat else 0, "FROM_OUTPUT": from_output,
        }  # fmt: skip
        apart = config.sums_apart and (need[0] or need[3]) and (need[1] or need[2])
        launch, *others = (
            NORM_BACKWARD.bind((parts, heads, 1), config.num_warps, named, (*dtypes, of))
            for of in (("rows", "sums") if apart else ("all",))
        )
        return BackwardPlan(
            launch=launch, sums_launch=others[0] if others else None,
            rows=rows, order=order, x=x_rows, dy=dy_rows, other=other_rows,
            memory_format=memory_format, flat_output=flat_output,
            in_place=flat_output and not any(operand.copy for operand in operands),
            reads_bias=shift is not None, partials=_blank(x.device, parts, heads * hidden_size),
            sums=tuple(_sum_of_partials(x.device, _dtype(t), parts, heads * hidden_size) for t in (weight, bias)),
            serve={},
        )  # fmt: skip

    strides = x.stride(), dy.stride(), None if other is None else other.stride()
    key = ("backward", x.shape, strides, dtypes, spec.but_eps, heads, limits, from_output)
    return remember(key, make)


def _sum_of_partials(device: torch.device, dtype: torch.dtype | None, parts: int, hidden_size: int) -> BoundKernel:
    config = reduce_config(hidden_size)
    named = {"parts": parts, "N": hidden_size, "BLOCK": config.block, "ROWS": config.rows}
    return REDUCE_PARTIALS.bind((-(-hidden_size // config.block), 1, 1), config.num_warps, named, (device, dtype))

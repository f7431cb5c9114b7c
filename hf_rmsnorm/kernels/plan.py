"""What a launch depends on besides the tensors' memory, worked out once per shape, strides, dtypes and formula."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..formula import NormSpec
from .rows import RowAddress, flat_strides, memory_order, row_address
from .sizes import COLUMNS, BackwardConfig, ForwardConfig, backward_config, forward_config

VECTOR = 8  # elements: 16 bytes of bf16, the widest load
_PLANS_KEPT = 8_192  # a plan is some hundred bytes; generation with a growing prompt makes one per length
_plans: dict = {}
_codes: dict = {}
_numbers = itertools.count()
Plan = TypeVar("Plan")


@dataclass(frozen=True)
class RowsPlan:
    """How one operand's rows are read: in place at `address`, or from a copy made first."""

    address: RowAddress
    copy: bool

    @classmethod
    def of(cls, shape, strides, order) -> RowsPlan:
        address = row_address(shape, strides, order)
        if address is not None:
            return cls(address, False)
        rows, hidden_size = math.prod(shape[:-1]), shape[-1]
        return cls(RowAddress(max(1, rows), 0, hidden_size), True)

    def vectorised(self) -> bool:
        return self.address.outer % VECTOR == 0 and self.address.inner % VECTOR == 0

    def arguments(self, unit: int) -> tuple[int, int, int]:
        return self.address.length, self.address.outer // unit, self.address.inner // unit


@dataclass(frozen=True)
class ForwardPlan:
    """One forward launch. `vectorised`: strides allow 16-byte loads, if the pointers do too.

    `other` is the second operand of x's shape, a gate or a residual; `sum_strides` are those of residual + x.
    `in_place` says that nothing is copied, neither operands nor outputs. `arguments` and `constants` are (unaligned,
    aligned) pairs; so are `codes`, which name the compiled code: without statistics, and with. `backward` holds the
    plans of backwards of such calls.
    """

    config: ForwardConfig
    rows: int
    grid: tuple[int, int, int]
    centered: bool
    order: tuple[int, ...] | None
    x: RowsPlan
    other: RowsPlan
    output_dtype: torch.dtype
    memory_format: torch.memory_format
    output_like_input: bool
    flat_output: bool
    sum_strides: tuple[int, ...] | None
    flat_sum: bool
    in_place: bool
    vectorised: bool
    arguments: tuple[tuple, tuple]
    constants: tuple[tuple, tuple]
    codes: tuple[tuple[int, int], tuple[int, int]]
    backward: dict


@dataclass(frozen=True)
class BackwardPlan:
    """One backward: the row launch (or, where the row loops, a launch for dx and one for the parameters).

    `other` is the gate, or the gradient that is added to dx. `reads_bias` and `reads_mean` say what else is read.
    """

    config: BackwardConfig
    rows: int
    parts: int
    order: tuple[int, ...] | None
    heads: int
    x: RowsPlan
    dy: RowsPlan
    other: RowsPlan
    memory_format: torch.memory_format
    flat_output: bool
    in_place: bool
    reads_bias: bool
    reads_mean: bool
    vectorised: bool
    arguments: tuple[tuple, tuple]
    constants: tuple[tuple, tuple]
    codes: tuple[int, int]
    columns_constants: tuple[tuple, tuple]
    columns_codes: tuple[int, int]


def code_of(*key) -> int:
    """A number for what compiled code depends on (device, dtypes, absent operands, constants), quick to look up."""
    return _codes.setdefault(key, next(_numbers))


def remember(key: tuple, make: Callable[[], Plan]) -> Plan:
    plan = _plans.get(key)
    if plan is None:
        plan = make()
        if len(_plans) >= _PLANS_KEPT:
            _plans.clear()
        _plans[key] = plan
    return plan


def row_order(x: torch.Tensor, contiguous_output: bool, heads: int) -> tuple[int, ...] | None:
    """The leading dimensions of x in the order in which the kernels number its rows, or None where that is their own.

    Where each head has a weight of its own, rows keep their order: the kernel tells the head by the row's number.
    """
    if contiguous_output or heads > 1 or x.is_contiguous():
        return None
    return memory_order(tuple(x.shape), x.stride())


def _layout(x: torch.Tensor, contiguous_output: bool, weight: torch.Tensor | None, heads: int):
    """(order in which rows are numbered, memory format of the output, whether that output is flat in this order)."""
    shape = tuple(x.shape)
    if contiguous_output:
        return None, torch.contiguous_format, True
    order = row_order(x, contiguous_output, heads)
    with _disable_current_modes():  # what eager's strides would be is our question, not an operator of the caller's
        output = torch.empty_like(x, device="meta")
        if heads > 1 and weight is not None:  # such a weight has a say in the order of their product
            product = torch.empty_like(weight, device="meta") * output
            if product.is_contiguous():
                return order, torch.contiguous_format, True
    return order, torch.preserve_format, flat_strides(shape, output.stride(), order)


def _sum_of(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """residual + x without its data: what is asked of it is its strides."""
    with _disable_current_modes():
        both = (torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in (residual, x))
        return torch.add(*both)


def kernel_rounding(spec: NormSpec, weight: torch.Tensor | None) -> str:
    """The kernel's rounding: where the weight is float32, rounding to its dtype is no rounding."""
    if spec.rounding == "weight_dtype" and weight.dtype == torch.float32:
        return "once"
    return spec.rounding


def formula_key(spec: NormSpec) -> tuple:
    """All of a spec that compiled code depends on."""
    return (
        spec.centered, spec.weight_offset, spec.rounds_offset, spec.rounding, spec.eps_outside, spec.weight_first,
        spec.gate,
    )  # fmt: skip


def _dtype(t: torch.Tensor | None) -> torch.dtype | None:
    return None if t is None else t.dtype


def heads_of(*parameters: torch.Tensor | None) -> int:
    """How many rows of parameters there are: each row of x takes the next."""
    return next((p.shape[0] for p in parameters if p is not None and p.dim() == 2), 1)


NO_ROWS = RowsPlan(RowAddress(1, 0, 0), False)


def forward_plan(x, weight, bias, gate, spec: NormSpec, contiguous_output: bool, residual=None) -> ForwardPlan:
    """The launch of `spec` on tensors like these; none of their values is read."""
    formula, heads = formula_key(spec), heads_of(weight, bias)
    dtypes = (x.device, x.dtype, *map(_dtype, (weight, bias, gate)))
    other = gate if residual is None else residual

    def make() -> ForwardPlan:
        shape = tuple(x.shape)
        hidden_size, rows = shape[-1], math.prod(shape[:-1])
        total = x if residual is None else _sum_of(x, residual)
        order, memory_format, flat_output = _layout(total, contiguous_output, weight, heads)
        x_rows = RowsPlan.of(shape, x.stride(), order)
        other_rows = NO_ROWS if other is None else RowsPlan.of(shape, other.stride(), order)
        config = forward_config(hidden_size)
        output_dtype = spec.output_dtype(x.dtype, _dtype(weight))

        def arguments(unit):
            return (rows, *x_rows.arguments(unit), *other_rows.arguments(unit))

        def constants(unit):
            rounding = (spec.centered, spec.weight_offset, spec.rounds_offset, kernel_rounding(spec, weight))
            if config.loop:
                return hidden_size, config.block, unit, *rounding, spec.eps_outside
            return (
                hidden_size, config.block, config.rows, unit, heads, *rounding, spec.eps_outside, spec.weight_first,
                spec.gate,
            )  # fmt: skip

        pair = (constants(1), constants(VECTOR))
        flat_sum = flat_strides(shape, total.stride(), order)
        return ForwardPlan(
            config=config,
            rows=rows,
            grid=(-(-rows // (config.rows * heads)), heads, 1),
            centered=spec.centered,
            order=order,
            x=x_rows,
            other=other_rows,
            output_dtype=output_dtype,
            memory_format=memory_format,
            output_like_input=output_dtype == x.dtype and memory_format == torch.preserve_format,
            flat_output=flat_output,
            sum_strides=None if residual is None else total.stride(),
            flat_sum=flat_sum,
            in_place=not (x_rows.copy or other_rows.copy) and flat_output and (residual is None or flat_sum),
            vectorised=hidden_size % VECTOR == 0 and x_rows.vectorised() and other_rows.vectorised(),
            arguments=(arguments(1), arguments(VECTOR)),
            constants=pair,
            codes=tuple(
                tuple(code_of(dtypes, output_dtype, stats, residual is not None, c) for stats in (False, True))
                for c in pair
            ),
            backward={},
        )

    strides = x.stride(), None if other is None else other.stride()
    key = ("forward", x.shape, strides, dtypes, formula, heads, contiguous_output, residual is None)
    return remember(key, make)


def backward_plan(
    dy, x, weight, bias, gate, spec: NormSpec, need: tuple[bool, ...], contiguous_output: bool,
    limits: tuple[int, int], dh=None, from_output: bool = False,
) -> BackwardPlan:  # fmt: skip
    """The backward of `spec`; limits: (multiprocessors, bytes of shared memory a program may use).

    from_output: x is the norm's output.
    """
    formula, heads = formula_key(spec), heads_of(weight, bias)
    dtypes = (x.device, dy.dtype, x.dtype, *map(_dtype, (weight, bias, gate, dh)), need, spec.centered)
    other = gate if dh is None else dh

    def make() -> BackwardPlan:
        shape = tuple(x.shape)
        hidden_size, rows = shape[-1], math.prod(shape[:-1])
        sms, shared = limits
        order, memory_format, flat_output = _layout(x, contiguous_output, weight, heads)
        x_rows, dy_rows = (RowsPlan.of(shape, t.stride(), order) for t in (x, dy))
        other_rows = NO_ROWS if other is None else RowsPlan.of(shape, other.stride(), order)
        itemsize = max(t.element_size() for t in (x, dy, weight, other) if t is not None)
        config = backward_config(hidden_size, spec.centered, itemsize, shared, gate is not None, heads, dh is not None)
        rounding = kernel_rounding(spec, weight)
        offset = spec.weight_offset, spec.rounds_offset
        if config.loop:
            parts = max(1, min(-(-rows // 64), 4 * sms * COLUMNS.block // hidden_size + 1))
        else:
            programs = min(config.programs_per_sm, 4) if from_output else config.programs_per_sm  # as many as fit
            parts = max(1, min(-(-rows // (config.rows * heads)), sms * programs // heads))

        def arguments(unit):
            return (*dy_rows.arguments(unit), *x_rows.arguments(unit), *other_rows.arguments(unit))

        def constants(unit):
            if config.loop:
                return hidden_size, config.block, unit, *offset, spec.eps_outside, from_output
            return (
                hidden_size, config.block, config.rows, unit, heads, *offset, rounding, spec.eps_outside,
                spec.weight_first, spec.gate, config.stages, config.reload_weight, from_output,
            )  # fmt: skip

        pair = (constants(1), constants(VECTOR))
        columns_constants = tuple(
            (hidden_size, COLUMNS.block, COLUMNS.rows, unit, *offset, rounding, from_output) for unit in (1, VECTOR)
        )
        return BackwardPlan(
            config=config,
            rows=rows,
            parts=parts,
            order=order,
            heads=heads,
            x=x_rows,
            dy=dy_rows,
            other=other_rows,
            memory_format=memory_format,
            flat_output=flat_output,
            in_place=flat_output and not (x_rows.copy or dy_rows.copy or other_rows.copy),
            reads_bias=from_output or (spec.gated_after and need[3:] == (True,)),
            reads_mean=not (from_output and spec.centered),
            vectorised=hidden_size % VECTOR == 0 and all(r.vectorised() for r in (x_rows, dy_rows, other_rows)),
            arguments=(arguments(1), arguments(VECTOR)),
            constants=pair,
            codes=tuple(code_of(dtypes, c) for c in pair),
            columns_constants=columns_constants,
            columns_codes=tuple(code_of(dtypes, c) for c in columns_constants),
        )

    strides = x.stride(), dy.stride(), None if other is None else other.stride()
    key = ("backward", x.shape, strides, dtypes, formula, heads, contiguous_output, limits, from_output)
    return remember(key, make)

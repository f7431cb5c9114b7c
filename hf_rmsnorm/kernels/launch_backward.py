"""Launches of the backwards of norms of rows, as `launch` has those of the forwards."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..formula import NormSpec
from . import compiled
from .launch import MODULATE, NORM_BACKWARD, REDUCE_PARTIALS, formula_constants
from .rows import (
    addresses,
    allocator,
    blank,
    heads_of,
    output_like,
    row_order,
    start_on_copies,
)
from .serves import require
from .sizes import BackwardCase, backward_config, reduce_config


class BackwardOperands(NamedTuple):
    """The operands of a backward, in the order of the kernel's parameters.

    Args:
        dy: (..., hidden_size) of any strides.
        x, weight, bias, gate: as in the forward.
        dh: another gradient of x, of x's shape and any strides, which is added to dx
            before that is rounded; or None. Not with a gate.
        rstd, mean: results of the forward.
    """

    dy: Tensor
    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    gate: Tensor | None
    dh: Tensor | None
    rstd: Tensor
    mean: Tensor | None

    @property
    def other(self) -> Tensor | None:
        """The gate or dh: one address serves both."""
        return self.gate if self.dh is None else self.dh


class NormBackward:
    """The backward of a formula on operands of this layout.

    Args:
        operands: `BackwardOperands`.
        aligned: those that are read start at multiples of 16 bytes.
        need: whether dx, dweight, dbias and (with a gate) dgate are wanted.
        from_output: x is the result of the forward, in the dtype and with the order of
            rows of its input; mean is None.
        modulation: as in `NormForward`.

    Raises:
        NotImplementedError: no kernel computes this formula.
    """

    def __init__(
        self, spec: NormSpec, operands: tuple, aligned: bool, need: tuple[bool, ...],
        from_output: bool = False, modulation: str = MODULATE,
    ):  # fmt: skip
        require(spec, "rows", *(("from the output",) if from_output else ()))
        operands = BackwardOperands(*operands)
        dy, x, weight, bias, gate, *_ = operands
        size, heads = x.shape[-1], heads_of(weight, bias)
        constants = formula_constants(spec, weight, gate, modulation)
        rows = math.prod(x.shape[:-1])
        self.need_x, self.need_weight, self.need_bias, self.need_gate = need
        gates_y = (constants["GATE"] or "").endswith("_after")
        # else only how many there are
        self.reads_bias = from_output or (gates_y and self.need_gate)
        self.order = row_order(x, spec, heads)
        dx = output_like(x, spec, weight, heads, x.dtype)
        dg = dx if gate is None else dx.to(gate.dtype)
        self.empty_dx, self.empty_dg = allocator(x, dx), allocator(x, dg)
        self.in_place, flat, addressed = addresses(
            self.order, [dx], dy=dy, x=x, other=operands.other
        )
        sms, shared = compiled.device_limits(x.device.type, x.device.index)
        config = backward_config(self._case(spec, operands, from_output, shared))
        tiles = -(-rows // (config.rows * heads))
        parts = max(1, min(tiles, sms * config.programs_per_sm // heads))
        named = {
            "N": size,
            "BLOCK": config.block,
            "ROWS": config.rows,
            "HEADS": heads,
            "STAGES": config.stages,
            "RELOAD_W": config.reload_weight,
            "GAPS": config.gaps,
            "FROM_OUTPUT": from_output,
            "FLAT": size if flat and config.flat else 0,
            "rows_total": rows,
            **constants,
            **addressed,
        }
        grid = (parts, heads, 1)

        def bound():
            return NORM_BACKWARD.bind(grid, config.num_warps, named, x.device, aligned)

        needs_sums = self.need_weight or self.need_bias
        needs_rows = self.need_x or self.need_gate
        self.start, self.sums_apart = bound(), None
        if config.sums_apart and needs_sums and needs_rows:
            self.sums_apart = bound()
        self.partials = blank(x.device, parts, heads * size)
        self.sum_weight = _sum_of_partials(x.device, parts, heads * size)
        self.sum_bias = _sum_of_partials(x.device, parts, heads * size)

    def _case(
        self, spec: NormSpec, operands: BackwardOperands, from_output: bool, shared: int
    ) -> BackwardCase:
        x, weight = operands.x, operands.weight
        shift = operands.bias if self.reads_bias else None
        read = (x, operands.dy, weight, shift, operands.other)
        return BackwardCase(
            hidden_size=x.shape[-1],
            centered=spec.centered,
            itemsize=max(t.element_size() for t in read if t is not None),
            shared_limit=shared,
            gated=operands.gate is not None,
            added=operands.dh is not None,
            reads_bias=shift is not None,
            from_output=from_output,
            mixed=weight is not None and weight.dtype != x.dtype,
        )

    def launch(self, *operands):
        """(dx, dweight, dbias, dgate), None where not wanted; the sums of those of
        parameters have a fixed order.
        """
        dy, x, weight, bias, gate, dh, rstd, mean = operands
        dx = self.empty_dx(x) if self.need_x else None
        dg = self.empty_dg(x) if self.need_gate else None
        dw = torch.empty_like(self.partials) if self.need_weight else None
        db = torch.empty_like(self.partials) if self.need_bias else None
        shift = bias if self.reads_bias else None
        read = dy, x, weight, shift, gate, dh, rstd, mean
        written = dx, dw, db, dg
        if self.in_place:
            self._start((*read, *written))
        else:
            start_on_copies(self._start, read, written, x.shape, self.order)
        if self.need_weight:
            dw = _summed(self.sum_weight, dw, weight)
        if self.need_bias:
            db = _summed(self.sum_bias, db, bias)
        return dx, dw, db, dg

    def _start(self, operands: tuple) -> None:
        if self.sums_apart is None:
            self.start.on(operands)
            return
        *read, dx, dw, db, dg = operands
        self.start.on((*read, dx, None, None, dg))
        without_dh = BackwardOperands(*read)._replace(dh=None)
        self.sums_apart.on((*without_dh, None, dw, db, None))


def _sum_of_partials(device: torch.device, parts: int, hidden_size: int):
    config = reduce_config(hidden_size)
    named = {
        "parts": parts,
        "N": hidden_size,
        "BLOCK": config.block,
        "ROWS": config.rows,
    }
    grid = (-(-hidden_size // config.block), 1, 1)
    return REDUCE_PARTIALS.bind(grid, config.num_warps, named, device, aligned=True)


def _summed(start, partials: Tensor, parameter: Tensor) -> Tensor:
    total = torch.empty_like(parameter)
    start.on((partials, total))
    return total

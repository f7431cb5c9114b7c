"""Launches of the backwards of norms of rows, as `launch` has those of the forwards."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..formula import NormSpec
from . import compiled
from .launch import MODULATE, NORM_BACKWARD, REDUCE_PARTIALS, formula_constants, gate_of
from .rows import (
    RowAddress,
    blank,
    copied_in_order,
    flat_like,
    heads_of,
    in_order,
    output_layout,
)
from .serves import require
from .sizes import BackwardCase, BackwardConfig, backward_config, reduce_config


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


def reads_bias(
    spec: NormSpec, gate: Tensor | None, need: tuple, from_output: bool
) -> bool:
    """Whether a backward reads the values of the bias; else only how many there are."""
    after = (gate_of(spec, gate, MODULATE) or "").endswith("_after")
    return from_output or (after and need[3])


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
        x, weight = operands.x, operands.weight
        size, heads = x.shape[-1], heads_of(weight, operands.bias)
        self.rows, self.modulation = math.prod(x.shape[:-1]), modulation
        self.need_x, self.need_weight, self.need_bias, self.need_gate = need
        self.reads_bias = reads_bias(spec, operands.gate, need, from_output)
        self.order, self.memory_format, self.flat_output = output_layout(
            x, spec, weight, heads
        )
        self.like_input = self.memory_format == torch.preserve_format
        self.dy_rows = RowAddress.of(operands.dy, self.order)
        self.x_rows = RowAddress.of(x, self.order)
        self.other_rows = RowAddress.of(operands.other, self.order)
        copies = self.dy_rows.copy or self.x_rows.copy or self.other_rows.copy
        self.in_place = self.flat_output and not copies
        config = self._config(spec, operands, from_output)
        sms, _ = compiled.device_limits(x.device.type, x.device.index)
        tiles = -(-self.rows // (config.rows * heads))
        parts = max(1, min(tiles, sms * config.programs_per_sm // heads))
        self.partials = blank(x.device, parts, heads * size)
        needs_sums = self.need_weight or self.need_bias
        self.sums_apart = (
            config.sums_apart and needs_sums and (self.need_x or self.need_gate)
        )
        self.sum_weight = self.sum_bias = None
        if self.rows:
            named = self._arguments(spec, operands, config, heads)
            bound = (
                (parts, heads, 1),
                config.num_warps,
                {**named, "FROM_OUTPUT": from_output},
                x.device,
                aligned,
            )
            self.starts = [
                NORM_BACKWARD.bind(*bound) for _ in range(1 + self.sums_apart)
            ]
            self.sum_weight, self.sum_bias = (
                _sum_of_partials(x.device, parts, heads * size) for _ in range(2)
            )

    def _config(
        self, spec: NormSpec, operands: BackwardOperands, from_output: bool
    ) -> BackwardConfig:
        x, weight = operands.x, operands.weight
        _, shared = compiled.device_limits(x.device.type, x.device.index)
        shift = operands.bias if self.reads_bias else None
        read = (x, operands.dy, weight, shift, operands.other)
        case = BackwardCase(
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
        return backward_config(case)

    def _arguments(
        self,
        spec: NormSpec,
        operands: BackwardOperands,
        config: BackwardConfig,
        heads: int,
    ) -> dict:
        size = operands.x.shape[-1]
        addresses = self.dy_rows, self.x_rows, self.other_rows
        flat = config.flat and all(rows.flat(self.rows, size) for rows in addresses)
        return {
            "N": size,
            "BLOCK": config.block,
            "ROWS": config.rows,
            "HEADS": heads,
            "STAGES": config.stages,
            "RELOAD_W": config.reload_weight,
            "GAPS": config.gaps,
            "GATE": gate_of(spec, operands.gate, self.modulation),
            "FLAT": size if flat else 0,
            "rows_total": self.rows,
            **formula_constants(spec, operands.weight),
            **self.dy_rows.arguments("dy"),
            **self.x_rows.arguments("x"),
            **self.other_rows.arguments("other"),
        }

    def launch(self, dy, x, weight, bias, gate, dh, rstd, mean):
        """(dx, dweight, dbias, dgate), None where not wanted; the sums of those of
        parameters have a fixed order.
        """
        dx = dw = db = dg = None
        if self.need_x:
            dx = (
                torch.empty_like(x)
                if self.like_input
                else torch.empty_like(x, memory_format=self.memory_format)
            )
        if self.need_gate:
            dg = torch.empty_like(x, dtype=gate.dtype, memory_format=self.memory_format)
        if not self.rows:
            dw = torch.zeros_like(weight) if self.need_weight else None
            db = torch.zeros_like(bias) if self.need_bias else None
            return dx, dw, db, dg
        if self.need_weight:
            dw = torch.empty_like(self.partials)
        if self.need_bias:
            db = torch.empty_like(self.partials)
        shift = bias if self.reads_bias else None
        read = dy, x, weight, shift, gate, dh, rstd, mean
        if self.in_place:
            self._start(read, dx, dw, db, dg)
        else:
            self._start_on_copies(read, dx, dw, db, dg)
        if self.need_weight:
            dw = _summed(self.sum_weight, dw, weight)
        if self.need_bias:
            db = _summed(self.sum_bias, db, bias)
        return dx, dw, db, dg

    def _start(self, read: tuple, dx, dw, db, dg) -> None:
        if not self.sums_apart:
            self.starts[0].on((*read, dx, dw, db, dg))
            return
        of_rows, of_sums = self.starts
        of_rows.on((*read, dx, None, None, dg))
        of_sums.on((*BackwardOperands(*read)._replace(dh=None), None, dw, db, None))

    def _start_on_copies(self, read: tuple, dx, dw, db, dg) -> None:
        read, order = BackwardOperands(*read), self.order
        if self.dy_rows.copy:
            read = read._replace(dy=copied_in_order(read.dy, order))
        if self.x_rows.copy:
            read = read._replace(x=copied_in_order(read.x, order))
        if self.other_rows.copy:
            read = read._replace(
                gate=copied_in_order(read.gate, order),
                dh=copied_in_order(read.dh, order),
            )
        if self.flat_output:
            self._start(read, dx, dw, db, dg)
            return
        rows_of_dx, rows_of_dg = flat_like(dx, order), flat_like(dg, order)
        self._start(read, rows_of_dx, dw, db, rows_of_dg)
        for result, rows in ((dx, rows_of_dx), (dg, rows_of_dg)):
            if rows is not None:
                in_order(result, order).copy_(rows)


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

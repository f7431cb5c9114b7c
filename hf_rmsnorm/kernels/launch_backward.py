"""Launches of the backwards of norms of rows, as `launch` has those of the forwards."""

import math

import torch
from torch import Tensor

from ..formula import NormSpec
from . import compiled
from .launch import NORM_BACKWARD, REDUCE_PARTIALS, formula_constants, gate_of
from .rows import RowAddress, blank, copied_in_order, flat_like, heads_of, in_order, output_layout
from .serves import require
from .sizes import BackwardConfig, backward_config, reduce_config


def reads_bias(spec: NormSpec, gate: Tensor | None, need: tuple, from_output: bool) -> bool:
    """Whether a backward reads the values of the bias; else only how many there are."""
    after = (gate_of(spec, gate) or "").endswith("_after")
    return from_output or (after and need[3])


class NormBackward:
    """The backward of a formula on operands laid out like these.

    Args:
        operands: (dy, x, weight, bias, gate, dh, rstd, mean). dy is (..., hidden_size) of any strides and read only,
            dh, of x's shape and any strides, is another gradient of x, added to dx before that is rounded; or None. Not
            with a gate. The others are as in the forward, and what it returned.
        aligned: those that are read start at multiples of 16 bytes.
        need: whether dx, dweight, dbias and (with a gate) dgate are wanted.
        from_output: x is what the forward returned, in the dtype and with the order of rows of its input; mean is None.

    Raises:
        NotImplementedError: no kernel computes this formula.
    """

    def __init__(
        self, spec: NormSpec, operands: tuple, aligned: bool, need: tuple[bool, ...], from_output: bool = False
    ):
        dy, x, weight, bias, gate, dh, _, _ = operands
        require(spec, "rows", *(("from the output",) if from_output else ()))
        size, rows, heads = x.shape[-1], math.prod(x.shape[:-1]), heads_of(weight, bias)
        other = gate if dh is None else dh
        self.need_x, self.need_weight, self.need_bias, self.need_gate = need
        self.order, self.memory_format, self.flat_output = output_layout(x, spec, weight, heads)
        self.like_input = self.memory_format == torch.preserve_format
        self.dy_rows, self.x_rows, self.other_rows = (RowAddress.of(t, self.order) for t in (dy, x, other))
        self.copies = self.dy_rows.copy or self.x_rows.copy or self.other_rows.copy
        self.in_place = self.flat_output and not self.copies
        self.reads_bias = reads_bias(spec, gate, need, from_output)
        config = self._config(spec, operands, from_output)
        sms, _ = compiled.device_limits(x.device.type, x.device.index)
        parts = max(1, min(-(-rows // (config.rows * heads)), sms * config.programs_per_sm // heads))
        self.partials = blank(x.device, parts, heads * size)
        needs_sums = self.need_weight or self.need_bias
        self.sums_apart = config.sums_apart and needs_sums and (self.need_x or self.need_gate)
        self.rows = rows
        self.sum_weight = self.sum_bias = None
        if not rows:
            return
        flat = config.flat and all(t.flat(rows, size) for t in (self.dy_rows, self.x_rows, self.other_rows))
        named = {
            "N": size,
            "BLOCK": config.block,
            "ROWS": config.rows,
            "HEADS": heads,
            "STAGES": config.stages,
            "RELOAD_W": config.reload_weight,
            "GAPS": config.gaps,
            "GATE": gate_of(spec, gate),
            "FROM_OUTPUT": from_output,
            "FLAT": size if flat else 0,
            "rows_total": rows,
            **formula_constants(spec, weight),
            **self.dy_rows.arguments("dy"),
            **self.x_rows.arguments("x"),
            **self.other_rows.arguments("other"),
        }
        bound = (parts, heads, 1), config.num_warps, named, x.device, aligned
        self.starts = [NORM_BACKWARD.bind(*bound) for _ in range(1 + self.sums_apart)]
        self.sum_weight, self.sum_bias = (_sum_of_partials(x.device, parts, heads * size) for _ in range(2))

    def _config(self, spec: NormSpec, operands: tuple, from_output: bool) -> BackwardConfig:
        dy, x, weight, bias, gate, dh, _, _ = operands
        _, shared = compiled.device_limits(x.device.type, x.device.index)
        other = gate if dh is None else dh
        shift = bias if self.reads_bias else None
        return backward_config(
            x.shape[-1],
            spec.centered,
            max(t.element_size() for t in (x, dy, weight, shift, other) if t is not None),
            shared,
            gated=gate is not None,
            added=dh is not None,
            reads_bias=shift is not None,
            from_output=from_output,
            mixed=weight is not None and weight.dtype != x.dtype,
        )

    def launch(self, dy, x, weight, bias, gate, dh, rstd, mean):
        """(dx, dweight, dbias, dgate), None where not wanted; those of parameters are summed in a fixed order."""
        dx = dw = db = dg = None
        if self.need_x:
            dx = torch.empty_like(x) if self.like_input else torch.empty_like(x, memory_format=self.memory_format)
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
        if self.in_place:
            self._start(dy, x, weight, shift, gate, dh, rstd, mean, dx, dw, db, dg)
        else:
            self._start_on_copies((dy, x, weight, shift, gate, dh, rstd, mean), dx, dw, db, dg)
        if self.need_weight:
            dw = _summed(self.sum_weight, dw, weight)
        if self.need_bias:
            db = _summed(self.sum_bias, db, bias)
        return dx, dw, db, dg

    def _start(self, dy, x, weight, shift, gate, dh, rstd, mean, dx, dw, db, dg) -> None:
        if not self.sums_apart:
            self.starts[0].on((dy, x, weight, shift, gate, dh, rstd, mean, dx, dw, db, dg))
            return
        of_rows, of_sums = self.starts
        of_rows.on((dy, x, weight, shift, gate, dh, rstd, mean, dx, None, None, dg))
        of_sums.on((dy, x, weight, shift, gate, None, rstd, mean, None, dw, db, None))

    def _start_on_copies(self, operands: tuple, dx, dw, db, dg) -> None:
        dy, x, weight, shift, gate, dh, rstd, mean = operands
        order = self.order
        if self.dy_rows.copy:
            dy = copied_in_order(dy, order)
        if self.x_rows.copy:
            x = copied_in_order(x, order)
        if self.other_rows.copy:
            gate, dh = copied_in_order(gate, order), copied_in_order(dh, order)
        out, out_gate = (dx, dg) if self.flat_output else (flat_like(dx, order), flat_like(dg, order))
        self._start(dy, x, weight, shift, gate, dh, rstd, mean, out, dw, db, out_gate)
        for result, rows in ((dx, out), (dg, out_gate)):
            if rows is not result:
                in_order(result, order).copy_(rows)


def _sum_of_partials(device: torch.device, parts: int, hidden_size: int):
    config = reduce_config(hidden_size)
    named = {"parts": parts, "N": hidden_size, "BLOCK": config.block, "ROWS": config.rows}
    grid = (-(-hidden_size // config.block), 1, 1)
    return REDUCE_PARTIALS.bind(grid, config.num_warps, named, device, aligned=True)


def _summed(start, partials: Tensor, parameter: Tensor) -> Tensor:
    total = torch.empty_like(parameter)
    start.on((partials, total))
    return total

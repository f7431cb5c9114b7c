"""Launches of the backwards of norms of rows, as `launch` has those of the forwards."""

import math

import torch

from ..formula import NormSpec
from . import compiled
from .launch import MODULATE, NORM_BACKWARD, formula_constants, sum_of_partials
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
from .sizes import BackwardCase, backward_config


class NormBackward:
    """The backward of a formula on operands of this layout.

    Args:
        operands: (dy, x, weight, bias, gate, dh, rstd, mean), in the order of the
            kernel's parameters. dy is of any strides; x, weight, bias and gate are as
            in the forward, rstd and mean its results. dh is another gradient of x, of
            x's shape and any strides, which is added to dx before that is rounded; or
            None. Not with a gate.
        aligned: those that are read start at multiples of 16 bytes.
        need: whether dx, dweight, dbias and (with a gate) dgate are wanted.
        from_output: x is the result of the forward, in the dtype and with the order of
            rows of its input; mean is None.
        modulation: as in `NormForward`.

    Raises:
        NotImplementedError: no kernel computes this formula.
    """

    def __init__(
        self,
        spec: NormSpec,
        operands: tuple,
        aligned: bool,
        need: tuple[bool, ...],
        from_output: bool = False,
        modulation: str = MODULATE,
    ):
        require(spec, "rows")
        if from_output:
            require(spec, "from the output")
        dy, x, weight, bias, gate, dh, *_ = operands
        size = x.shape[-1]
        rows = math.prod(x.shape[:-1])
        heads = heads_of(weight, bias)
        constants = formula_constants(spec, weight, gate, modulation)
        self.need_x, self.need_weight, self.need_bias, self.need_gate = need
        gates_y = gate is not None and constants["GATE"] != "silu_before"
        # else only how many there are
        self.reads_bias = from_output or (gates_y and self.need_gate)
        shift = bias if self.reads_bias else None
        self.order = row_order(x, spec, heads)
        dx = output_like(x, spec, weight, heads, x.dtype)
        dg = dx
        if gate is not None:
            dg = dx.to(gate.dtype)
        self.empty_dx = allocator(x, dx)
        self.empty_dg = allocator(x, dg)
        other = gate if dh is None else dh  # one address serves both
        named = {"dy": dy, "x": x, "other": other}
        self.in_place, flat, addressed = addresses(self.order, [dx], named, apart=True)
        sms, shared = compiled.device_limits(x.device.type, x.device.index)
        read = x, dy, weight, shift, other
        case = BackwardCase(
            hidden_size=size,
            centered=spec.centered,
            itemsize=max(t.element_size() for t in read if t is not None),
            shared_limit=shared,
            gated=gate is not None,
            added=dh is not None,
            reads_bias=shift is not None,
            from_output=from_output,
            mixed=weight is not None and weight.dtype != x.dtype,
        )
        config = backward_config(case)
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
        self.start = NORM_BACKWARD.bind(
            grid, config.num_warps, named, x.device, aligned
        )
        halves = 2 if self.need_bias else 1
        self.partials = blank(x.device, halves, parts, heads * size)
        self.sum = sum_of_partials(x.device, parts, parts, heads * size)

    def launch(self, operands: tuple) -> tuple:
        """(dx, dweight, dbias, dgate), None where not wanted; the sums of those of
        parameters have a fixed order.
        """
        dy, x, weight, bias, gate, dh, rstd, mean = operands
        dx = self.empty_dx(x) if self.need_x else None
        dg = self.empty_dg(x) if self.need_gate else None
        partials = of_weight = of_bias = dweight = dbias = None
        if self.need_weight or self.need_bias:
            partials = torch.empty_like(self.partials)
        if self.need_weight:
            dweight = torch.empty_like(weight)
            of_weight = partials
        if self.need_bias:
            dbias = torch.empty_like(bias)
            of_bias = partials[1]
            if self.need_weight:
                of_weight = partials[0]
        shift = bias if self.reads_bias else None
        read = dy, x, weight, shift, gate, dh, rstd, mean
        written = dx, of_weight, of_bias, dg
        if self.in_place:
            self.start.on(read + written)
        else:
            start_on_copies(
                self.start.on, read, written, x.shape, self.order, apart=True
            )
        if partials is not None:
            self.sum.on((partials, dweight, dbias))
        return dx, dweight, dbias, dg

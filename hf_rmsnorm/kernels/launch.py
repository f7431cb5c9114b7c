"""Launches of the norms of rows: made once for a layout of tensors, then called on all
tensors of that layout.

The outputs, the kernel and its constants follow from the shapes, strides, dtypes and
alignment of the operands.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..formula import NormSpec
from . import backward, forward
from .compiled import Kernel
from .rows import (
    RowAddress,
    blank,
    copied_in_order,
    flat_like,
    flat_strides,
    heads_of,
    in_order,
    output_layout,
    sum_without_data,
    without_data,
)
from .saved import Saved, as_saved, require_saved, saved_as
from .serves import require
from .sizes import forward_config

NORM_FORWARD = Kernel(forward.norm_forward)
NORM_BACKWARD = Kernel(backward.norm_backward, contracts=True)
REDUCE_PARTIALS = Kernel(backward.reduce_partials)
MODULATE = "modulate_after"
KERNELS = (NORM_FORWARD, NORM_BACKWARD, REDUCE_PARTIALS)


class Operands(NamedTuple):
    """The operands of a forward, in the order of the kernel's parameters.

    Args:
        x: (..., hidden_size) of any strides, on a device that Triton serves.
        weight, bias: contiguous, (hidden_size,), or (heads, hidden_size) for x of (...,
            heads, hidden_size); or None.
        gate: x's shape, any strides, where the spec has one; else the scale of a
            modulation, whose result is ``norm * (1 + gate) + shift``, or ``norm * gate
            + shift``, each operator rounding: all operands of one dtype then.
        shift, factor: of gate's shape and strides, or None; factor multiplies x before
            it is added.
        residual: x's shape, any strides and dtype: the norm is that of h = residual +
            x. Not with a parameter that has heads, nor with the gate of a formula; with
            the scale of a modulation both are contiguous.
    """

    x: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None
    gate: Tensor | None = None
    shift: Tensor | None = None
    factor: Tensor | None = None
    residual: Tensor | None = None


def formula_constants(spec: NormSpec, weight: Tensor | None) -> dict:
    """The constants of a formula that every kernel takes; to round to the dtype of a
    float32 weight rounds nothing.
    """
    rounds_nothing = spec.rounding == "weight_dtype" and weight.dtype == torch.float32
    return {
        "eps": spec.eps,
        "CENTERED": spec.centered,
        "OFFSET": spec.weight_offset,
        "ROUND_OFFSET": spec.rounds_offset,
        "ROUNDING": "once" if rounds_nothing else spec.rounding,
        "EPS_OUTSIDE": spec.eps_outside,
    }


def gate_of(spec: NormSpec, gate: Tensor | None, modulation: str) -> str | None:
    """How a kernel applies the gate; without one in the formula, that operand is the
    scale of a modulation.
    """
    return modulation if spec.gate is None and gate is not None else spec.gate


class Nothing:
    """A `Start` for no rows."""

    @staticmethod
    def on(operands: tuple) -> None:
        """Do nothing."""


class NormForward:
    """The forward of a formula on operands of this layout; it reads none of their
    values.

    Args:
        aligned: the operands start at multiples of 16 bytes.
        stats: also return rstd and mean for the backward.
        keep_sum: round h to its dtype first, and return it; else normalise it as
            float32 holds it.
        modulation: ``"modulate_after"`` or ``"multiply_after"``, as `Operands.gate`
            says.

    Attributes:
        shape: that of x.
        strides: those of the normalised tensor: x, or the sum.

    Raises:
        NotImplementedError: no kernel computes this formula.
    """

    def __init__(
        self, spec: NormSpec, operands: tuple, aligned: bool, stats: bool = True,
        keep_sum: bool = True, modulation: str = MODULATE,
    ):  # fmt: skip
        x, weight, bias, gate, _, _, residual = operands
        require(spec, "rows", *(() if residual is None else ("residual sum",)))
        size, rows, heads = x.shape[-1], math.prod(x.shape[:-1]), heads_of(weight, bias)
        total = x if residual is None else sum_without_data(x, residual)
        self.order, self.memory_format, self.flat_output = output_layout(
            total, spec, weight, heads
        )
        self.x_rows = RowAddress.of(x, self.order)
        self.other_rows = RowAddress.of(residual if gate is None else gate, self.order)
        self.dtype = spec.output_dtype(
            total.dtype, None if weight is None else weight.dtype
        )
        self.like_input = (
            self.dtype == total.dtype and self.memory_format == torch.preserve_format
        )
        self.shape, self.strides = x.shape, total.stride()
        self.keeps_sum = keep_sum
        self.sum_dtype = total.dtype
        self.sum_like_input = (
            total.dtype == x.dtype and total.stride() == without_data(x).stride()
        )
        self.flat_sum = residual is None or flat_strides(
            tuple(x.shape), total.stride(), self.order
        )
        self.in_place = (
            not (self.x_rows.copy or self.other_rows.copy)
            and self.flat_output
            and self.flat_sum
        )
        self.blank = blank(x.device, rows)
        self.stats, self.has_mean = stats, stats and spec.centered
        normed = "x" if residual is None else "residual + x"
        second = "scale" if spec.gate is None else "gate"
        named = {normed: total, "weight": weight, "bias": bias, second: gate}
        self.saved = saved_as(named, rows, ("rstd", "mean"))
        self.device = x.device
        gate_kind = gate_of(spec, gate, modulation)
        self.start = (
            self._bound(spec, weight, gate_kind, heads, rows, size, aligned)
            if rows
            else Nothing
        )

    def _bound(self, spec, weight, gate_kind, heads, rows, size, aligned):
        config = forward_config(size)
        flat = self.x_rows.flat(rows, size) and self.other_rows.flat(rows, size)
        named = {
            "N": size,
            "BLOCK": config.block,
            "ROWS": config.rows,
            "HEADS": heads,
            "GATE": gate_kind,
            "FLAT": size if flat else 0,
            "rows_total": rows,
            **formula_constants(spec, weight),
            **self.x_rows.arguments("x"),
            **self.other_rows.arguments("other"),
        }
        grid = (-(-rows // (config.rows * heads)), heads, 1)
        return NORM_FORWARD.bind(grid, config.num_warps, named, self.device, aligned)

    def launch(self, x, weight, bias, gate, shift, factor, residual):
        """(y, rstd, mean, h): rstd and mean are (rows,) float32 or None; mean is None
        for RMSNorm, h without a sum.
        """
        like, h = x, None
        if residual is not None:
            like = torch.empty_like(x) if self.sum_like_input else self._empty_sum(x)
            h = like if self.keeps_sum else None
        # Without options, which take as long again as a dictionary look-up.
        y = torch.empty_like(like) if self.like_input else self._empty_output(like)
        rstd = torch.empty_like(self.blank) if self.stats else None
        mean = torch.empty_like(self.blank) if self.has_mean else None
        if self.in_place:
            self.start.on(
                (x, weight, bias, gate, shift, factor, residual, h, y, rstd, mean)
            )
        else:
            self._start_on_copies(
                Operands(x, weight, bias, gate, shift, factor, residual),
                h,
                y,
                rstd,
                mean,
            )
        return y, rstd, mean, h

    def _empty_sum(self, x: Tensor) -> Tensor:
        return torch.empty_strided(
            x.shape, self.strides, dtype=self.sum_dtype, device=x.device
        )

    def _empty_output(self, like: Tensor) -> Tensor:
        return torch.empty_like(
            like, dtype=self.dtype, memory_format=self.memory_format
        )

    def _start_on_copies(self, operands: Operands, h, y, rstd, mean) -> None:
        order = self.order
        if self.x_rows.copy:
            operands = operands._replace(x=copied_in_order(operands.x, order))
        if self.other_rows.copy:
            others = ("gate", "shift", "factor", "residual")
            operands = operands._replace(
                **{
                    name: copied_in_order(getattr(operands, name), order)
                    for name in others
                }
            )
        out = y if self.flat_output else flat_like(y, order)
        out_h = h if self.flat_sum else flat_like(h, order)
        self.start.on((*operands, out_h, out, rstd, mean))
        for result, rows in ((y, out), (h, out_h)):
            if rows is not result:
                in_order(result, order).copy_(rows)

    def as_saved(
        self, strides: tuple, operands: tuple, dy: Tensor, dh: Tensor | None
    ) -> tuple:
        """(normed, weight, bias, gate, rstd, mean) as a backward reads them: in the
        layout that the forward read.

        Hooks of saved tensors (`torch.autograd.graph.save_on_cpu`) may give tensors
        back with other strides.

        Args:
            strides: of the saved x or sum, by which its rows are numbered.

        Raises:
            RuntimeError: one has another shape, dtype or device than the forward read.
        """
        gradients = (
            Saved("the gradient", self.shape),
            Saved("the gradient of the sum", self.shape),
        )
        require_saved(self.device, (*self.saved, *gradients), (*operands, dy, dh))
        return as_saved(strides, *operands)

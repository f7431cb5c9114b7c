"""Launches of the norms of rows: made once for a layout of tensors, then called on all
tensors of that layout.

The outputs, the kernel and its constants follow from the shapes, strides, dtypes and
alignment of the operands.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..formula import NormSpec, OptionalTensor
from . import backward, forward
from .compiled import Kernel, Start
from .rows import (
    addresses,
    allocator,
    blank,
    heads_of,
    output_like,
    row_order,
    start_on_copies,
    sum_without_data,
)
from .serves import require
from .sizes import forward_config, reduce_config

NORM_FORWARD = Kernel(forward.norm_forward)
NORM_BACKWARD = Kernel(backward.norm_backward, contracts=True)
REDUCE_PARTIALS = Kernel(backward.reduce_partials)
MODULATE = "modulate_after"
KERNELS = (NORM_FORWARD, NORM_BACKWARD, REDUCE_PARTIALS)


class Operands(NamedTuple):
    """The operands of a forward, in the order of the kernel's parameters.

    Args:
        x: (..., hidden_size) of any strides and at least one row, on a device that
            Triton serves.
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
    weight: OptionalTensor = None
    bias: OptionalTensor = None
    gate: OptionalTensor = None
    shift: OptionalTensor = None
    factor: OptionalTensor = None
    residual: OptionalTensor = None


def formula_constants(
    spec: NormSpec, weight: OptionalTensor, gate: OptionalTensor, modulation: str
) -> dict:
    """The constants of a formula that every kernel takes.

    Without a gate in the formula, that operand is the scale of a modulation. To round
    to the dtype of a float32 weight rounds nothing.
    """
    rounds_nothing = spec.rounding == "weight_dtype" and weight.dtype == torch.float32
    return {
        "eps": spec.eps,
        "CENTERED": spec.centered,
        "OFFSET": spec.weight_offset,
        "ROUND_OFFSET": spec.rounds_offset,
        "ROUNDING": "once" if rounds_nothing else spec.rounding,
        "EPS_OUTSIDE": spec.eps_outside,
        "GATE": modulation if spec.gate is None and gate is not None else spec.gate,
    }


def sum_of_partials(
    device: torch.device, parts: int, parts_behind: int, hidden_size: int
) -> Start:
    """What sums partial gradients: started on (partial sums, gradient of the first
    `parts` rows, gradient of the `parts_behind` rows behind them).
    """
    config = reduce_config(hidden_size)
    named = {
        "parts": parts,
        "parts_behind": parts_behind,
        "N": hidden_size,
        "BLOCK": config.block,
        "ROWS": config.rows,
    }
    grid = (-(-hidden_size // config.block), 2, 1)
    return REDUCE_PARTIALS.bind(grid, config.num_warps, named, device, aligned=True)


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
        strides: those of the normalised tensor: x, or the sum.

    Raises:
        NotImplementedError: no kernel computes this formula.
    """

    def __init__(
        self,
        spec: NormSpec,
        operands: tuple,
        aligned: bool,
        stats: bool = True,
        keep_sum: bool = True,
        modulation: str = MODULATE,
    ):
        x, weight, bias, gate, _, _, residual = operands
        require(spec, "rows")
        size = x.shape[-1]
        rows = math.prod(x.shape[:-1])
        heads = heads_of(weight, bias)
        total = x
        if residual is not None:
            require(spec, "residual sum")
            total = sum_without_data(x, residual)
        weight_dtype = None
        if weight is not None:
            weight_dtype = weight.dtype
        y_dtype = spec.output_dtype(total.dtype, weight_dtype)
        y = output_like(total, spec, weight, heads, y_dtype)
        outputs = [y]
        if residual is not None:
            outputs.append(total)
        read = {"x": x, "other": residual if gate is None else gate}
        self.strides = total.stride()
        self.order = row_order(total, spec, heads)
        self.empty_y = allocator(x, y)
        self.empty_h = allocator(x, total)
        self.keeps_sum = keep_sum and residual is not None
        self.blank = blank(x.device, rows)
        self.stats = stats
        self.has_mean = stats and spec.centered
        self.in_place, flat, addressed = addresses(self.order, outputs, read)
        config = forward_config(size)
        named = {
            "N": size,
            "BLOCK": config.block,
            "ROWS": config.rows,
            "HEADS": heads,
            "FLAT": size if flat else 0,
            "rows_total": rows,
            **formula_constants(spec, weight, gate, modulation),
            **addressed,
        }
        grid = (-(-rows // (config.rows * heads)), heads, 1)
        self.start = NORM_FORWARD.bind(grid, config.num_warps, named, x.device, aligned)

    def launch(self, operands: tuple) -> tuple:
        """(h, y, rstd, mean): rstd and mean are (rows,) float32 or None; mean is None
        for RMSNorm, and h unless a sum is kept.
        """
        x = operands[0]
        h = self.empty_h(x) if self.keeps_sum else None
        y = self.empty_y(x)
        rstd = torch.empty_like(self.blank) if self.stats else None
        mean = torch.empty_like(self.blank) if self.has_mean else None
        written = h, y, rstd, mean
        if self.in_place:
            self.start.on(operands + written)
        else:
            start_on_copies(self.start.on, operands, written, x.shape, self.order)
        return written

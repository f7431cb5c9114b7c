"""Launches of the norms of rows, forward and backward: made once for a layout of
tensors, then called on all tensors of that layout.

The outputs, the kernel and its constants follow from the shapes, strides, dtypes and
alignment of the operands. `ops.norm_kinds` makes them; `on` ends in `BoundKernel.start`.
"""

import math

import torch

from ..formula import NormSpec, OptionalTensor, dtype_of
from ..operands import ONE_PLUS, GradientOperands, NormOperands, present
from ..rows import (
    addresses,
    allocator,
    blank,
    heads_of,
    output_like,
    row_order,
    start_on_copies,
    strided_without_data,
)
from . import compiled, norm_backward, norm_forward
from .compiled import BoundKernel, Kernel
from .sizes import BackwardCase, backward_config, forward_config, reduce_config

NORM_FORWARD = Kernel(norm_forward.norm_forward)
NORM_BACKWARD = Kernel(norm_backward.norm_backward, contracts=True)
REDUCE_PARTIALS = Kernel(norm_backward.reduce_partials)
KERNELS = (NORM_FORWARD, NORM_BACKWARD, REDUCE_PARTIALS)


def formula_constants(spec: NormSpec, operands, modulation: str) -> dict:
    """The constants of a formula that every kernel takes.

    To round to the dtype of a float32 weight rounds nothing.
    """
    to_weight = spec.rounding == "weight_dtype"
    rounds_nothing = to_weight and operands.weight.dtype == torch.float32
    return {
        "eps": spec.eps,
        "CENTERED": spec.centered,
        "OFFSET": spec.weight_offset,
        "ROUND_OFFSET": spec.rounds_offset,
        "ROUNDING": "once" if rounds_nothing else spec.rounding,
        "EPS_OUTSIDE": spec.eps_outside,
        "GATE": spec.gate if operands.scale is None else modulation,
    }


def first_of(*tensors: OptionalTensor) -> OptionalTensor:
    """The first tensor that is there, or None: a kernel reads them by one address."""
    return next(iter(present(*tensors)), None)


def sum_of_partials(
    device: torch.device, parts: int, parts_behind: int, hidden_size: int
) -> BoundKernel:
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
        spec: a formula that `serves` lists.
        operands: also as a plain tuple.
        aligned: the operands start at multiples of 16 bytes.
        stats: also return rstd and mean for the backward.
        modulation: of the scale: `ONE_PLUS` or `ALONE`.

    Attributes:
        order: in which the rows of the normalised tensor, x or the sum, are numbered.
    """

    def __init__(
        self,
        spec: NormSpec,
        operands: NormOperands,
        aligned: bool,
        stats: bool = True,
        modulation: str = ONE_PLUS,
    ):
        operands = NormOperands(*operands)
        x, weight, bias, gate, scale, shift, multiplier, residual = operands
        size = x.shape[-1]
        rows = math.prod(x.shape[:-1])
        heads = heads_of(weight, bias)
        total = x
        if residual is not None:
            total = strided_without_data(residual) + strided_without_data(x)
        y_dtype = spec.output_dtype(total.dtype, dtype_of(weight))
        y = output_like(total, spec, weight, heads, y_dtype)
        outputs = [y]
        if residual is not None:
            outputs.append(total)
        other = first_of(gate, scale, residual)
        self.order = row_order(total, spec, heads)
        self.empty_y = allocator(x, y)
        self.empty_h = allocator(x, total)
        self.keeps_sum = residual is not None
        self.blank = blank(x.device, rows)
        self.stats = stats
        self.has_mean = stats and spec.centered
        read = {"x": x, "other": other}
        self.in_place, flat, addressed = addresses(self.order, outputs, read)
        config = forward_config(size)
        named = {
            "N": size,
            "BLOCK": config.block,
            "ROWS": config.rows,
            "HEADS": heads,
            "FLAT": size if flat else 0,
            "rows_total": rows,
            **formula_constants(spec, operands, modulation),
            **addressed,
        }
        grid = (-(-rows // (config.rows * heads)), heads, 1)
        self.kernel = NORM_FORWARD.bind(
            grid, config.num_warps, named, x.device, aligned
        )

    def on(self, operands: NormOperands) -> tuple:
        """`NormResults`, as a plain tuple."""
        x = operands[0]
        h = self.empty_h(x) if self.keeps_sum else None
        y = self.empty_y(x)
        rstd = torch.empty_like(self.blank) if self.stats else None
        mean = torch.empty_like(self.blank) if self.has_mean else None
        written = h, y, rstd, mean
        if self.in_place:
            self.kernel.start(operands + written)
        else:
            start_on_copies(self.kernel.start, operands, written, x.shape, self.order)
        return written


class NormBackward:
    """The backward of a formula on operands of this layout.

    Args:
        operands: also as a plain tuple.
        aligned: those that are read start at multiples of 16 bytes.
        need: whether dx, dweight, dbias, dgate and dscale are wanted.
        from_output: x is the result of the forward, in the dtype and with the order of
            rows of its input; mean is None.
        spec, modulation: as in `NormForward`.
    """

    def __init__(
        self,
        spec: NormSpec,
        operands: GradientOperands,
        aligned: bool,
        need: tuple[bool, ...],
        from_output: bool = False,
        modulation: str = ONE_PLUS,
    ):
        operands = GradientOperands(*operands)
        dy, x, weight, bias, gate, scale, dh, *_ = operands
        size = x.shape[-1]
        rows = math.prod(x.shape[:-1])
        heads = heads_of(weight, bias)
        constants = formula_constants(spec, operands, modulation)
        factor = first_of(gate, scale)
        self.need = need
        needs_factor = any(need[3:])
        multiplies_y = factor is not None and constants["GATE"] != "silu_before"
        # else only how many there are
        self.reads_bias = from_output or (multiplies_y and needs_factor)
        shift = bias if self.reads_bias else None
        self.order = row_order(x, spec, heads)
        dx = output_like(x, spec, weight, heads, x.dtype)
        self.empty_dx = allocator(x, dx)
        dfactor = dx if factor is None else dx.to(factor.dtype)
        self.empty_dfactor = allocator(x, dfactor)
        other = first_of(factor, dh)
        named = {"dy": dy, "x": x, "other": other}
        self.in_place, flat, addressed = addresses(self.order, [dx], named)
        sms, shared = compiled.device_limits(x.device.type, x.device.index)
        read = present(x, dy, weight, shift, other)
        case = BackwardCase(
            hidden_size=size,
            centered=spec.centered,
            itemsize=max(t.element_size() for t in read),
            shared_limit=shared,
            gated=factor is not None,
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
        self.kernel = NORM_BACKWARD.bind(
            grid, config.num_warps, named, x.device, aligned
        )
        _, _, need_bias, *_ = need
        halves = 2 if need_bias else 1
        self.partials = blank(x.device, halves, parts, heads * size)
        self.sum = sum_of_partials(x.device, parts, parts, heads * size)

    def on(self, operands: GradientOperands) -> tuple:
        """(dx, dweight, dbias, dgate, dscale), None where not wanted; the sums of those
        of parameters have a fixed order.
        """
        dy, x, weight, bias, gate, scale, dh, rstd, mean = operands
        need_x, need_weight, need_bias, need_gate, need_scale = self.need
        dx = self.empty_dx(x) if need_x else None
        dgate = self.empty_dfactor(x) if need_gate else None
        dscale = self.empty_dfactor(x) if need_scale else None
        partials = of_weight = of_bias = dweight = dbias = None
        if need_weight or need_bias:
            partials = torch.empty_like(self.partials)
        if need_weight:
            dweight = torch.empty_like(weight)
            of_weight = partials
        if need_bias:
            dbias = torch.empty_like(bias)
            of_bias = partials[1]  # the half 0 is the weight's
            if need_weight:
                of_weight = partials[0]
        shift = bias if self.reads_bias else None
        read = dy, x, weight, shift, gate, scale, dh, rstd, mean
        written = dx, of_weight, of_bias, dgate, dscale
        if self.in_place:
            self.kernel.start(read + written)
        else:
            start_on_copies(self.kernel.start, read, written, x.shape, self.order)
        if partials is not None:
            self.sum.start((partials, dweight, dbias))
        return dx, dweight, dbias, dgate, dscale

"""From tensors to kernel launches: outputs, copies where rows cannot be read in place, and the launches themselves.

Where a model waits for the host, as in decoding, each look-up counts: what a plan fixes is looked up once, by functions
that are made for the plan.
"""

from collections.abc import Callable

import torch

from . import counting
from .compiled import INTERPRETED, BoundKernel, Kernel, aligned_pointers, device_limits
from .plan import KERNELS, NORM_BACKWARD, NORM_FORWARD, REDUCE_PARTIALS, BackwardPlan, ForwardPlan

from .plan import backward_plan, forward_plan  # isort: skip

__all__ = ["INTERPRETED", "KERNELS", "Kernel", "device_limits", "forward_plan"]


def _in_order(t: torch.Tensor, order: tuple[int, ...] | None) -> torch.Tensor:
    return t if order is None else t.permute(*order, -1)


def norm_forward(
    x, weight, bias, spec, stats: bool, gate=None, residual=None, plan: ForwardPlan | None = None,
    keep_sum: bool = True, shift=None, factor=None,
):  # fmt: skip
    """Launch the forward of `spec`; see `hf_rmsnorm.ops` for the public function.

    Args:
        x: (..., hidden_size) of any strides, on a device that Triton serves.
        weight, bias: contiguous, (hidden_size,), or (heads, hidden_size) for x of (..., heads, hidden_size); or None.
        stats: also return what the backward needs.
        gate: x's shape, any strides, where the spec has one; else the scale of a modulation, whose result is
            ``norm * (1 + gate) + shift``, each operator rounding: all operands of one dtype then.
        shift, factor: of gate's shape and strides, or None; factor is what x is multiplied by where it is added.
        residual: x's shape, any strides and dtype: then h = residual + x is what is normalised. Not where a parameter
            has heads; with the scale of a modulation both are contiguous, with another gate there is none.
        keep_sum: h is rounded to its dtype first, and returned; else it is normalised as float32 holds it.
        plan: what `forward_plan` made of such tensors, if that has been called.

    Returns:
        (y, rstd, mean, h): rstd and mean are (rows,) float32 or None; mean is None for RMSNorm, h where none is kept.

    Raises:
        NotImplementedError: no kernel computes this formula.
    """
    if plan is None:
        plan = forward_plan(x, weight, bias, gate, spec, residual, keep_sum, shift, factor)
    serve = plan.serve[stats] or _forward(plan, stats)
    return serve(x, weight, bias, gate, residual, spec.eps, shift, factor)


def _forward(plan: ForwardPlan, stats: bool) -> Callable:
    bound, order, alone = plan.launch, plan.order, plan.alone
    pack, values, vectorised, ready = bound.pack, bound.values, bound.vectorised, bound.ready
    codes, counters = [each[stats] for each in bound.codes], counting.active
    rows, centered, in_place, keeps_sum = plan.rows, plan.centered, plan.in_place, plan.keeps_sum
    sum_like_input, like_input = plan.sum_like_input, plan.output_like_input
    dtype, memory_format, flat_output, flat_sum = plan.output_dtype, plan.memory_format, plan.flat_output, plan.flat_sum
    empty_like, blank = torch.empty_like, plan.blank

    def serve(x, weight, bias, gate, residual, eps, shift=None, factor=None):
        like, h, rstd, mean = x, None, None, None
        if residual is not None:
            like = h = empty_like(x) if sum_like_input else _empty_sum(plan, x)
        # Without options, which take as long again as a dictionary look-up.
        y = empty_like(like) if like_input else empty_like(like, dtype=dtype, memory_format=memory_format)
        if stats:
            rstd = empty_like(blank)
            mean = empty_like(blank) if centered else None
        if rows == 0:
            return y, rstd, mean, h
        out, out_h = y, h
        if not in_place:
            if plan.x.copy:
                x = _in_order(x, order).contiguous()
            if plan.other.copy:
                others = (None if t is None else _in_order(t, order) for t in (gate, residual, shift, factor))
                gate, residual, shift, factor = (None if t is None else t.contiguous() for t in others)
            out = y if flat_output else _flat_like(y, order)
            out_h = h if h is None or flat_sum else _flat_like(h, order)
        if not keeps_sum:
            h = out_h = None  # it lent the output its strides
        pointers = x.data_ptr() if weight is None else x.data_ptr() | weight.data_ptr()  # mostly these are all
        aligned = vectorised and not pointers & 15 and (alone or aligned_pointers(bias, gate, residual, shift, factor))
        args = pack(values[aligned], x, weight, bias, gate, shift, factor, residual, out_h, out, rstd, mean, eps)
        launcher = ready.get(codes[aligned])
        if launcher is None or counters or not launcher(args):
            NORM_FORWARD.load_and_launch(x.device, bound, args, aligned, stats)
        if out is not y:
            _in_order(y, order).copy_(out)
        if out_h is not h:
            _in_order(h, order).copy_(out_h)
        return y, rstd, mean, h

    plan.serve[stats] = serve
    return serve


def _empty_sum(plan: ForwardPlan, x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, plan.sum_strides, dtype=plan.sum_dtype, device=x.device)


def norm_backward(
    dy, x, weight, bias, rstd, mean, spec, need: tuple[bool, ...], gate=None, dh=None, from_output: bool = False,
    forward: ForwardPlan | None = None, launch: bool = True,
):  # fmt: skip
    """Launch the backward of `spec`.

    Args:
        dy: (..., hidden_size) of any strides; read only.
        x, weight, bias, gate: as in the forward.
        rstd, mean: what the forward returned.
        need: whether dx, dweight, dbias and (with a gate) dgate are wanted.
        dh: x's shape, any strides: another gradient of x, added to dx before that is rounded; or None. Not with a gate.
        from_output: x is what the forward returned, in the dtype and with the order of rows of its input; mean is None.
        forward: the plan of the forward, which keeps those of its backwards; the operands are what its `saved` says.
        launch: False only loads the kernels; what is returned is not written then.

    Returns:
        (dx, dweight, dbias, dgate), None where not wanted; parameter gradients are deterministic, summed in float32.

    Raises:
        NotImplementedError: no kernel computes this formula.
    """
    device, plan = x.device, None
    if forward is not None:  # the rest is as it was there
        key = _backward_key(dy, x, need, gate, dh, from_output)
        plan = forward.backward.get(key)
    if plan is None:
        limits = device_limits(device.type, device.index)
        plan = backward_plan(dy, x, weight, bias, gate, spec, need, limits, dh, from_output)
        if forward is not None:
            forward.backward[key] = plan
    serve = plan.serve.get(need) or _backward(plan, need)
    return serve(dy, x, weight, bias, rstd, mean, gate, dh, spec.eps, launch)


def backward_like(forward: ForwardPlan, dy, x, need: tuple[bool, ...], gate, dh, from_output: bool) -> Callable:
    """What serves backwards like one that was launched: (dy, x, weight, bias, rstd, mean, gate, dh, eps)."""
    return forward.backward[_backward_key(dy, x, need, gate, dh, from_output)].serve[need]


def _backward_key(dy, x, need, gate, dh, from_output) -> tuple:  # x may be the output, which lies otherwise
    other = gate if dh is None else dh
    like_other = None if other is None else (other.stride(), other.dtype)
    return dy.stride(), dy.dtype, x.stride(), need, from_output, like_other


def _backward(plan: BackwardPlan, need: tuple[bool, ...]) -> Callable:
    need_dx, need_dw, need_db, need_dg = (*need, False)[:4]
    order, memory_format, reads_bias, partials = plan.order, plan.memory_format, plan.reads_bias, plan.partials
    like_input, empty_like = memory_format == torch.preserve_format, torch.empty_like
    bound, apart = plan.launch, plan.sums_launch

    def serve(dy, x, weight, bias, rstd, mean, gate, dh, eps, launch=True):
        dx = dw = db = dg = None
        if need_dx:
            dx = empty_like(x) if like_input else empty_like(x, memory_format=memory_format)
        if need_dg:
            dg = empty_like(x, dtype=gate.dtype, memory_format=memory_format)
        if plan.rows == 0:
            return dx, torch.zeros_like(weight) if need_dw else None, torch.zeros_like(bias) if need_db else None, dg
        out, out_gate = dx, dg
        if not plan.in_place:
            x, dy, gate, dh = (
                _in_order(t, order).contiguous() if t is not None and rows.copy else t
                for t, rows in ((x, plan.x), (dy, plan.dy), (gate, plan.other), (dh, plan.other))
            )
            if not plan.flat_output:
                out, out_gate = (t if t is None else _flat_like(t, order) for t in (dx, dg))
        shift = bias if reads_bias else None
        aligned = bound.vectorised and aligned_pointers(x, dy, weight, shift, gate, dh)
        if need_dw:
            dw = empty_like(partials)
        if need_db:
            db = empty_like(partials)
        sums = (dw, db) if apart is None else (None, None)
        args = bound.pack(bound.values[aligned], dy, x, weight, shift, gate, dh, rstd, mean, out, *sums, out_gate, eps)
        start(NORM_BACKWARD, bound, args, x.device, aligned, launch=launch)
        if apart is not None:
            operands = dy, x, weight, shift, gate, None, rstd, mean, None, dw, db, None
            args = apart.pack(apart.values[aligned], *operands, eps)
            start(NORM_BACKWARD, apart, args, x.device, aligned, launch=launch)
        if not launch:
            return dx, dw, db, dg
        if out is not dx:
            _in_order(dx, order).copy_(out)
        if out_gate is not dg:
            _in_order(dg, order).copy_(out_gate)
        if need_dw:
            dw = _summed(plan.sums[0], dw, weight)
        if need_db:
            db = _summed(plan.sums[1], db, bias)
        return dx, dw, db, dg

    plan.serve[need] = serve
    return serve


def _summed(bound: BoundKernel, partials: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    total, aligned = torch.empty_like(parameter), bound.vectorised
    args = bound.pack(bound.values[aligned], partials, total)
    start(REDUCE_PARTIALS, bound, args, parameter.device, aligned)
    return total


def start(
    kernel: Kernel,
    bound: BoundKernel,
    args: tuple,
    device: torch.device,
    aligned: bool,
    way: int = 0,
    launch: bool = True,
) -> None:
    """Launch by the ready launcher where there is one, else load the kernel first; `launch=False` only loads it."""
    ready = bound.ready.get(bound.codes[aligned][way])
    if ready is None or counting.active or not launch or not ready(args):
        kernel.load_and_launch(device, bound, args, aligned, way, launch)


def _flat_like(t: torch.Tensor, order: tuple[int, ...] | None) -> torch.Tensor:
    return torch.empty(_in_order(t, order).shape, dtype=t.dtype, device=t.device)

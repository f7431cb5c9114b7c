"""From tensors to kernel launches: outputs, copies where rows cannot be read in place, and the launches themselves."""

from collections.abc import Callable

import torch

from . import quick
from .compiled import INTERPRETED, BoundKernel, Kernel, aligned_pointers, device_limits
from .plan import KERNELS, NORM_FORWARD, NORM_FORWARD_LOOP, REDUCE_PARTIALS, ForwardPlan, backward_plan, forward_plan

__all__ = [
    "INTERPRETED",
    "KERNELS",
    "Kernel",
    "device_limits",
    "forward_plan",
    "norm_backward",
    "norm_forward",
    "quick_backward",
]


def _in_order(t: torch.Tensor, order: tuple[int, ...] | None) -> torch.Tensor:
    return t if order is None else t.permute(*order, -1)


def norm_forward(x, weight, bias, spec, stats: bool, gate=None, residual=None, plan: ForwardPlan | None = None):
    """Launch the forward of `spec`; see `hf_rmsnorm.ops` for the public function.

    Args:
        x: (..., hidden_size) of any strides, on a device that Triton serves.
        weight, bias: contiguous, (hidden_size,), or (heads, hidden_size) for x of (..., heads, hidden_size); or None.
        stats: also return what the backward needs.
        gate: x's shape, any strides, where the spec has one.
        residual: x's shape, any strides and dtype: then h = residual + x is what is normalised. Not with a gate, and
            not where a parameter has heads.
        plan: what `forward_plan` made of such tensors, if that has been called.

    Returns:
        (y, rstd, mean, h): rstd and mean are (rows,) float32 or None; mean is None for RMSNorm, h without a residual.

    Raises:
        NotImplementedError: no kernel computes this formula.
    """
    if plan is None:
        plan = forward_plan(x, weight, bias, gate, spec, residual)
    elif (found := plan.quick[stats](x, weight, bias, residual, spec.eps)) is not None:
        return found
    device, like, h, rstd, mean = x.device, x, None, None, None
    if residual is not None:
        like = h = torch.empty_strided(x.shape, plan.sum_strides, dtype=plan.sum_dtype, device=device)
    if plan.output_like_input:  # without options, which take as long again as a dictionary look-up
        y = torch.empty_like(like)
    else:
        y = torch.empty_like(like, dtype=plan.output_dtype, memory_format=plan.memory_format)
    if stats:
        rstd = torch.empty(plan.rows, dtype=torch.float32, device=device)
        mean = torch.empty_like(rstd) if plan.centered else None
    if plan.rows == 0:
        return y, rstd, mean, h
    out, out_h = y, h
    if not plan.in_place:
        if plan.x.copy:
            x = _in_order(x, plan.order).contiguous()
        if plan.other.copy:
            gate, residual = (None if t is None else _in_order(t, plan.order).contiguous() for t in (gate, residual))
        out = y if plan.flat_output else _flat_like(y, plan.order)
        out_h = h if h is None or plan.flat_sum else _flat_like(h, plan.order)
    launch, kernel = plan.launch, NORM_FORWARD_LOOP if plan.loop else NORM_FORWARD
    aligned = launch.vectorised and aligned_pointers(x, weight, bias, gate, residual)
    args = launch.pack(
        launch.values[aligned], X=x, W=weight, B=bias, G=gate, RES=residual, H=out_h, Y=out, RSTD=rstd, MEAN=mean,
        eps=spec.eps,
    )  # fmt: skip
    kernel(device, launch, args, aligned, stats)
    if gate is None:
        plan.quick[stats] = quick.forward(plan, stats)
    if out is not y:
        _in_order(y, plan.order).copy_(out)
    if out_h is not h:
        _in_order(h, plan.order).copy_(out_h)
    return y, rstd, mean, h


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
        forward: the plan of the forward, which keeps those of its backwards.
        launch: False only loads the kernels; what is returned is not written then.

    Returns:
        (dx, dweight, dbias, dgate), None where not wanted; parameter gradients are deterministic, summed in float32.

    Raises:
        NotImplementedError: no kernel computes this formula.
    """
    device, plan = x.device, None
    if forward is not None:  # the rest is as it was there
        key = _backward_key(dy, need, from_output, dh)
        plan = forward.backward.get(key)
    if plan is None:
        limits = device_limits(device.type, device.index)
        plan = backward_plan(dy, x, weight, bias, gate, spec, need, limits, dh, from_output)
        if forward is not None:
            forward.backward[key] = plan
            if from_output:  # a CUDA graph keeps inputs, and can load no kernel: those that read them are loaded here
                stats = rstd, rstd if spec.centered else None
                norm_backward(dy, x, weight, bias, *stats, spec, need, gate, dh, False, forward, launch=False)
    need_dx, need_dw, need_db, need_dg = (*need, False)[:4]
    dx = torch.empty_like(x, memory_format=plan.memory_format) if need_dx else None
    dg = torch.empty_like(x, dtype=gate.dtype, memory_format=plan.memory_format) if need_dg else None
    if plan.rows == 0:
        return dx, torch.zeros_like(weight) if need_dw else None, torch.zeros_like(bias) if need_db else None, dg
    out, out_gate = dx, dg
    if not plan.in_place:
        x, dy, gate, dh = (
            _in_order(t, plan.order).contiguous() if t is not None and rows.copy else t
            for t, rows in ((x, plan.x), (dy, plan.dy), (gate, plan.other), (dh, plan.other))
        )
        if not plan.flat_output:
            out, out_gate = (t if t is None else _flat_like(t, plan.order) for t in (dx, dg))
    shift = bias if plan.reads_bias else None
    pointers = aligned_pointers(x, dy, weight, shift, gate, dh)
    dw = torch.empty(plan.partials, dtype=torch.float32, device=device) if need_dw else None
    db = torch.empty(plan.partials, dtype=torch.float32, device=device) if need_db else None
    for kernel, bound in plan.launches:
        aligned = bound.vectorised and pointers
        args = bound.pack(
            bound.values[aligned], DY=dy, X=x, W=weight, B=shift, G=gate, DH=dh, RSTD=rstd, MEAN=mean, DX=out, DW=dw,
            DB=db, DG=out_gate, eps=spec.eps,
        )  # fmt: skip
        kernel(device, bound, args, aligned, launch=launch)
    if not launch:
        return dx, dw, db, dg
    if out is not dx:
        _in_order(dx, plan.order).copy_(out)
    if out_gate is not dg:
        _in_order(dg, plan.order).copy_(out_gate)
    if need_dw:
        dw = _summed(plan.sums[0], dw, weight)
    if need_db:
        db = _summed(plan.sums[1], db, bias)
    return dx, dw, db, dg


def quick_backward(forward: ForwardPlan, dy, need: tuple[bool, ...], from_output: bool, dh) -> Callable:
    """What serves backwards like the one that was just launched."""
    return quick.backward(forward.backward[_backward_key(dy, need, from_output, dh)], need)


def _backward_key(dy, need, from_output, dh) -> tuple:
    return dy.stride(), dy.dtype, need, from_output, None if dh is None else (dh.stride(), dh.dtype)


def _summed(launch: BoundKernel, partials: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    total, aligned = torch.empty_like(parameter), launch.vectorised
    args = launch.pack(launch.values[aligned], PARTIALS=partials, OUT=total)
    REDUCE_PARTIALS(parameter.device, launch, args, aligned)
    return total


def _flat_like(t: torch.Tensor, order: tuple[int, ...] | None) -> torch.Tensor:
    return torch.empty(_in_order(t, order).shape, dtype=t.dtype, device=t.device)

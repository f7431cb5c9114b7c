"""Calls like one that was served before: what such a launch needs, looked up once, in as few steps as Python allows.

Where a model waits for the host, as in decoding, each look-up counts: these do again what `launch` does, for operands
that are read in place, and answer None where a call is another.
"""

from collections.abc import Callable

import torch

from . import counting


def never(*_) -> None:
    """What serves a plan's calls before the first has been launched."""


def forward(plan, stats: bool) -> Callable:
    """`norm_forward` of a plan that has been launched, of (x, weight, bias, residual, eps)."""
    pack, values, ready = _start_of(plan.launch, stats)
    if ready is None or not plan.in_place:
        return never
    rows, centered, like_input = plan.rows, plan.centered, plan.output_like_input
    strides, sum_dtype, dtype, memory_format = plan.sum_strides, plan.sum_dtype, plan.output_dtype, plan.memory_format
    empty_like, empty, float32, counters = torch.empty_like, torch.empty, torch.float32, counting.active

    def quick(x, weight, bias, residual, eps):
        pointers, like, h, rstd, mean = x.data_ptr(), x, None, None, None
        if weight is not None:
            pointers |= weight.data_ptr()
        if bias is not None:
            pointers |= bias.data_ptr()
        if residual is not None:
            pointers |= residual.data_ptr()
        if pointers & 15 or counters:
            return None
        if residual is not None:
            like = h = torch.empty_strided(x.shape, strides, dtype=sum_dtype, device=x.device)
        # Without options, which take as long again as a dictionary look-up.
        y = empty_like(like) if like_input else empty_like(like, dtype=dtype, memory_format=memory_format)
        if stats:
            rstd = empty(rows, dtype=float32, device=x.device)
            mean = empty_like(rstd) if centered else None
        started = ready(pack(values, x, weight, bias, None, residual, h, y, rstd, mean, eps))
        return (y, rstd, mean, h) if started else None

    return quick


def backward(plan, need: tuple[bool, ...]) -> Callable:
    """`norm_backward` of a plan that has been launched, of (dy, x, weight, bias, rstd, mean, dh, eps)."""
    need_dx, need_dw, need_db, need_dg = (*need, False)[:4]
    launches = [_start_of(bound) for _, bound in plan.launches]
    sums = [_start_of(bound) if needed else None for bound, needed in zip(plan.sums, (need_dw, need_db), strict=True)]
    if need_dg or not plan.in_place or any(found is not None and found[2] is None for found in (*launches, *sums)):
        return never
    shape, reads_bias, memory_format, counters = plan.partials, plan.reads_bias, plan.memory_format, counting.active
    empty_like, empty, float32 = torch.empty_like, torch.empty, torch.float32

    def quick(dy, x, weight, bias, rstd, mean, dh, eps):
        pointers, shift, device = x.data_ptr() | dy.data_ptr(), bias if reads_bias else None, x.device
        for t in (weight, shift, dh):
            if t is not None:
                pointers |= t.data_ptr()
        if pointers & 15 or counters:
            return None
        dx = empty_like(x, memory_format=memory_format) if need_dx else None
        dw = empty(shape, dtype=float32, device=device) if need_dw else None
        db = empty(shape, dtype=float32, device=device) if need_db else None
        for pack, values, ready in launches:
            if not ready(pack(values, dy, x, weight, shift, None, dh, rstd, mean, dx, dw, db, None, eps)):
                return None
        return dx, _sum(sums[0], dw, weight), _sum(sums[1], db, bias), None

    return quick


def _sum(start: tuple | None, partials: torch.Tensor | None, parameter: torch.Tensor | None) -> torch.Tensor | None:
    if start is None:
        return None
    pack, values, ready = start
    total = torch.empty_like(parameter)
    ready(pack(values, partials, total))
    return total


def _start_of(bound, way: int = 0) -> tuple:
    """(pack, values, what starts it or None) of a launch where pointers are aligned."""
    return bound.pack, bound.values[bound.vectorised], bound.ready.get(bound.codes[bound.vectorised][way])

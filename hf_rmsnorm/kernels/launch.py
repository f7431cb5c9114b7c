"""From tensors to kernel launches: outputs, addresses, launch shapes and the cache of compiled kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import triton
from torch.utils._python_dispatch import _disable_current_modes

from . import backward, backward_wide, counting, forward
from .interpreter import faithful_interpreter
from .plan import VECTOR, BackwardPlan, ForwardPlan, backward_plan, code_of, forward_plan
from .sizes import COLUMNS, REDUCE

INTERPRETED = not isinstance(forward.norm_forward, triton.runtime.JITFunction)
HIP = torch.version.hip is not None
INTERPRETER_SMS = 2  # small, so that the interpreter walks the persistent loops too
INTERPRETER_SHARED = 232_448
_interpreter_lock = threading.RLock()  # Triton's interpreter keeps its program index in a global


class Kernel:
    """One Triton function in its two variants, and what has been compiled of them.

    The aligned variant may assume that every pointer is a multiple of 16 bytes; the other assumes nothing. No integer
    is specialised on its value, so these two are all there is per set of compile-time constants and dtypes.
    """

    def __init__(self, function):
        self.name = function.__name__
        self._compiled: dict = {}
        if not INTERPRETED:
            names = [p.name for p in function.params if not p.is_constexpr]
            integers = [name for name in names if not name.isupper()]
            self._variants = {
                True: triton.jit(function.fn, do_not_specialize=integers),
                False: triton.jit(function.fn, do_not_specialize=names),
            }
        else:
            self._variants = {True: function, False: function}

    def __call__(self, device: torch.device, grid: tuple, args: tuple, code: int, aligned: bool, num_warps: int):
        """Launch on `device`; `code`, of `plan.code_of`, stands for all that the compiled code depends on."""
        index = device.index
        if index is not None and not INTERPRETED and index != current_device(device.type)():
            with torch.get_device_module(device.type).device(device):
                self(device, grid, args, code, aligned, num_warps)
            return
        if counting.active:
            counting.record_launch(self.name)
        if INTERPRETED:
            with _interpreter_lock, _disable_current_modes(), faithful_interpreter():
                self._variants[aligned][grid](*args)
            return
        code = 2 * code + aligned
        if HIP:  # there Triton addresses storage below 2 GiB by 32 bits, and compiles once more for a larger one
            code = (code, *(t.untyped_storage().nbytes() < 2**31 for t in args if isinstance(t, torch.Tensor)))
        compiled = self._compiled.get(code)
        if compiled is None:
            # FP fusion is asked for by name: its default differs between versions of Triton.
            kernel = self._variants[aligned][grid](*args, num_warps=num_warps, enable_fp_fusion=True)
            self._compiled[code] = Compiled.of(kernel)
            return
        # Quicker than kernel[grid](*args), which makes a closure, finds out the device and builds what Triton's launch
        # hooks are told, each time.
        kernel, run, function, metadata, stream_of, index = compiled
        before, after = _hooks.launch_enter_hook, _hooks.launch_exit_hook
        if getattr(before, "calls", before) or getattr(after, "calls", after):
            kernel[grid](*args)
        else:
            run(*grid, stream_of(index), function, metadata, None, None, None, *args)


_hooks = triton.knobs.runtime


class Compiled(NamedTuple):
    """A compiled kernel and what a launch on the device that it was compiled for needs of it."""

    kernel: triton.compiler.CompiledKernel
    run: Callable
    function: object
    metadata: tuple
    stream_of: Callable[[int], int]
    index: int

    @classmethod
    def of(cls, kernel) -> Compiled:
        active = triton.runtime.driver.active
        described = kernel.run, kernel.function, kernel.packed_metadata
        return cls(kernel, *described, active.get_current_stream, active.get_current_device())


@cache
def current_device(device_type: str) -> Callable[[], int]:
    """What tells the index of the current device, without torch's checks: a tensor there has initialised it."""
    known = {"cuda": "_cuda_getDevice", "xpu": "_xpu_getDevice"}.get(device_type, "")
    return getattr(torch._C, known, None) or torch.get_device_module(device_type).current_device


NORM_FORWARD = Kernel(forward.norm_forward)
NORM_FORWARD_LOOP = Kernel(forward.norm_forward_loop)
NORM_BACKWARD = Kernel(backward.norm_backward)
NORM_BACKWARD_LOOP = Kernel(backward_wide.norm_backward_loop)
NORM_BACKWARD_COLUMNS = Kernel(backward_wide.norm_backward_columns)
REDUCE_PARTIALS = Kernel(backward.reduce_partials)
KERNELS = (
    NORM_FORWARD, NORM_FORWARD_LOOP, NORM_BACKWARD, NORM_BACKWARD_LOOP, NORM_BACKWARD_COLUMNS, REDUCE_PARTIALS
)  # fmt: skip


@cache
def device_limits(device_type: str, index: int | None) -> tuple[int, int]:
    """(multiprocessors, bytes of shared memory one program may use) of a device."""
    if INTERPRETED:
        return INTERPRETER_SMS, INTERPRETER_SHARED
    properties = torch.get_device_module(device_type).get_device_properties(index)
    sms = getattr(properties, "multi_processor_count", None) or getattr(properties, "gpu_subslice_count", 64)
    shared = getattr(properties, "shared_memory_per_block_optin", 0) or 65_536
    return sms, shared


def aligned_pointers(*tensors: torch.Tensor | None) -> bool:
    pointers = 0
    for t in tensors:
        if t is not None:
            pointers |= t.data_ptr()
    return pointers % 16 == 0


def _in_order(t: torch.Tensor, order: tuple[int, ...] | None) -> torch.Tensor:
    return t if order is None else t.permute(*order, -1)


def norm_forward(x, weight, bias, spec, stats: bool, contiguous_output: bool, gate=None, residual=None):
    """Launch the forward of `spec`; see `hf_rmsnorm.ops` for the public function.

    Args:
        x: (..., hidden_size) of any strides, on a device that Triton serves.
        weight, bias: contiguous, (hidden_size,), or (heads, hidden_size) for x of (..., heads, hidden_size); or None.
        stats: also return what the backward needs.
        contiguous_output: give y in row-major order (as `F.layer_norm`) instead of x's own order (as pointwise ops).
        gate: x's shape, any strides, where the spec has one.
        residual: x's shape and dtype, any strides: then h = residual + x is what is normalised. Not with a gate, and
            not where a parameter has heads.

    Returns:
        (y, rstd, mean, h): rstd and mean are (rows,) float32 or None; mean is None for RMSNorm, h without a residual.
    """
    plan = forward_plan(x, weight, bias, gate, spec, contiguous_output, residual)
    return run_forward(plan, x, weight, bias, gate, residual, spec.eps, stats)


def run_forward(plan: ForwardPlan, x, weight, bias, gate, residual, eps: float, stats: bool):
    """`norm_forward` of tensors like those that the plan was made for."""
    device, like, h, rstd, mean = x.device, x, None, None, None
    if residual is not None:
        like = h = torch.empty_strided(x.shape, plan.sum_strides, dtype=x.dtype, device=device)
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
    aligned = plan.vectorised and aligned_pointers(x, weight, bias, gate, residual)
    rest = (residual, out_h, out, rstd, mean, *plan.arguments[aligned], eps, *plan.constants[aligned])
    args = (x, weight, bias, *rest) if plan.config.loop else (x, weight, bias, gate, *rest)
    kernel = NORM_FORWARD_LOOP if plan.config.loop else NORM_FORWARD
    kernel(device, plan.grid, args, plan.codes[aligned][stats], aligned, plan.config.num_warps)
    if out is not y:
        _in_order(y, plan.order).copy_(out)
    if out_h is not h:
        _in_order(h, plan.order).copy_(out_h)
    return y, rstd, mean, h


def norm_backward(
    dy, x, weight, bias, rstd, mean, spec, need: tuple[bool, ...], contiguous_output: bool, gate=None, dh=None,
    from_output: bool = False,
):  # fmt: skip
    """Launch the backward of `spec`.

    Args:
        dy: (..., hidden_size) of any strides; read only.
        x, weight, bias, gate: as in the forward.
        rstd, mean: what the forward returned.
        need: whether dx, dweight, dbias and (with a gate) dgate are wanted.
        dh: x's shape, any strides: another gradient of x, added to dx before that is rounded; or None. Not with a gate.
        from_output: x is what the forward returned, in the dtype and with the order of rows of its input; mean is None.

    Returns:
        (dx, dweight, dbias, dgate), None where not wanted; parameter gradients are deterministic, summed in float32.
    """
    device = x.device
    limits = device_limits(device.type, device.index)
    plan = backward_plan(dy, x, weight, bias, gate, spec, need, contiguous_output, limits, dh, from_output)
    return run_backward(plan, dy, x, weight, bias, rstd, mean, spec.eps, need, gate, dh)


def run_backward(plan: BackwardPlan, dy, x, weight, bias, rstd, mean, eps: float, need, gate=None, dh=None):
    """`norm_backward` of tensors like those that the plan was made for."""
    need_dx, need_dw, need_db, need_dg = (*need, False)[:4]
    dx = torch.empty_like(x, memory_format=plan.memory_format) if need_dx else None
    dg = torch.empty_like(x, dtype=gate.dtype, memory_format=plan.memory_format) if need_dg else None
    if plan.rows == 0:
        return dx, torch.zeros_like(weight) if need_dw else None, torch.zeros_like(bias) if need_db else None, dg
    out, out_gate, device = dx, dg, x.device
    if not plan.in_place:
        x, dy, gate, dh = (
            _in_order(t, plan.order).contiguous() if t is not None and rows.copy else t
            for t, rows in ((x, plan.x), (dy, plan.dy), (gate, plan.other), (dh, plan.other))
        )
        if not plan.flat_output:
            out, out_gate = (t if t is None else _flat_like(t, plan.order) for t in (dx, dg))
    shift = bias if plan.reads_bias else None
    mean = mean if plan.reads_mean else rstd  # not read, but there
    aligned = plan.vectorised and aligned_pointers(x, dy, weight, shift, gate, dh)
    config, addresses, constants = plan.config, plan.arguments[aligned], plan.constants[aligned]
    partials = plan.parts, plan.heads * x.shape[-1]
    dw = torch.empty(partials, dtype=torch.float32, device=device) if need_dw else None
    db = torch.empty(partials, dtype=torch.float32, device=device) if need_db else None
    code, warps = plan.codes[aligned], config.num_warps
    if not config.loop:
        args = (dy, x, weight, shift, gate, dh, rstd, mean, out, dw, db, out_gate, plan.rows, *addresses, eps)
        NORM_BACKWARD(device, (plan.parts, plan.heads, 1), (*args, *constants), code, aligned, warps)
    else:
        if need_dx:
            args = (dy, x, weight, shift, dh, rstd, mean, out, *addresses, eps, *constants)
            NORM_BACKWARD_LOOP(device, (plan.rows, 1, 1), args, code, aligned, warps)
        if need_dw or need_db:
            grid = (-(-x.shape[-1] // COLUMNS.block), plan.parts, 1)
            args = (dy, x, weight, shift, rstd, mean, dw, db, plan.rows, -(-plan.rows // plan.parts), *addresses[:6])
            args += plan.columns_constants[aligned]
            NORM_BACKWARD_COLUMNS(device, grid, args, plan.columns_codes[aligned], aligned, COLUMNS.num_warps)
    if out is not dx:
        _in_order(dx, plan.order).copy_(out)
    if out_gate is not dg:
        _in_order(dg, plan.order).copy_(out_gate)
    if need_dw:
        dw = _reduced(dw, weight)
    if need_db:
        db = _reduced(db, bias)
    return dx, dw, db, dg


@cache
def _reduction(device: torch.device, dtype: torch.dtype, hidden_size: int) -> tuple[tuple, tuple, int]:
    constants = (hidden_size, REDUCE.block, REDUCE.rows)
    return (-(-hidden_size // REDUCE.block), 1, 1), constants, code_of(device, dtype, constants)


def _reduced(partials: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    parts, hidden_size = partials.shape
    device = parameter.device
    grid, constants, code = _reduction(device, parameter.dtype, hidden_size)
    total = torch.empty_like(parameter)
    args = (partials, total, parts, *constants)
    REDUCE_PARTIALS(device, grid, args, code, hidden_size % VECTOR == 0, REDUCE.num_warps)
    return total


def _flat_like(t: torch.Tensor, order: tuple[int, ...] | None) -> torch.Tensor:
    return torch.empty(_in_order(t, order).shape, dtype=t.dtype, device=t.device)

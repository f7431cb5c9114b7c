"""From tensors to kernel launches: outputs, addresses, launch shapes and the cache of compiled kernels."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from functools import cache

import torch
import triton
from torch.utils._python_dispatch import _disable_current_modes

from . import backward, forward
from .config import COLUMNS, REDUCE, backward_config, forward_config
from .counting import record_launch
from .rows import RowAddress, addressable_rows, flat_in_order, memory_order

INTERPRETED = not isinstance(forward.norm_forward, triton.runtime.JITFunction)
VECTOR = 8  # elements: 16 bytes of bf16, the widest load
INTERPRETER_SMS = 2  # small, so that the interpreter walks the persistent loops too
INTERPRETER_SHARED = 232_448
_interpreter_lock = threading.RLock()  # Triton's interpreter keeps its program index in a global


@contextmanager
def _faithful_interpreter():
    """Make Triton's interpreter convert float32 to bfloat16 as GPUs do, for the length of one launch.

    It truncates where hardware rounds to nearest even.
    """
    import numpy as np
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    original = interpreter._convert_float

    def convert(data, source, target, rounding_mode):
        if source == tl.float32 and target == tl.bfloat16:
            data = np.ascontiguousarray(data)
            bits = data.view(np.uint32).astype(np.uint64)
            rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
            rounded[np.isnan(data.view(np.float32))] = 0x7FC0
            return rounded.reshape(data.shape)
        if source == tl.bfloat16 and target == tl.float32:
            data = np.ascontiguousarray(data)
            return (data.view(np.uint16).astype(np.uint32) << 16).reshape(data.shape)
        return original(data, source, target, rounding_mode)

    # The lock is held and the launch is ours, so nobody else sees the replacement; `with np.errstate`: inf and nan
    # inputs are the caller's business, not a warning.
    interpreter._convert_float = convert
    try:
        with np.errstate(all="ignore"):
            yield
    finally:
        interpreter._convert_float = original


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

    def __call__(self, device: torch.device, grid: tuple, args: tuple, key: tuple, aligned: bool, num_warps: int):
        """Launch on `device`; `key` holds what the compiled code depends on (dtypes, absent operands, constants)."""
        record_launch(self.name)
        if INTERPRETED:
            with _interpreter_lock, _disable_current_modes(), _faithful_interpreter():
                self._variants[aligned][grid](*args)
        elif device.index is not None and device.index != _current_device(device.type):
            with torch.get_device_module(device.type).device(device):
                self._launch(device, grid, args, key, aligned, num_warps)
        else:
            self._launch(device, grid, args, key, aligned, num_warps)

    def _launch(self, device, grid, args, key, aligned, num_warps):
        key = (aligned, device, key)
        compiled = self._compiled.get(key)
        if compiled is None:
            # FP fusion is asked for by name: its default differs between versions of Triton.
            self._compiled[key] = self._variants[aligned][grid](*args, num_warps=num_warps, enable_fp_fusion=True)
        else:
            compiled[grid](*args)


def _current_device(device_type: str) -> int:
    return torch.get_device_module(device_type).current_device()


NORM_FORWARD = Kernel(forward.norm_forward)
NORM_FORWARD_LOOP = Kernel(forward.norm_forward_loop)
NORM_BACKWARD = Kernel(backward.norm_backward)
NORM_BACKWARD_LOOP = Kernel(backward.norm_backward_loop)
NORM_BACKWARD_COLUMNS = Kernel(backward.norm_backward_columns)
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


def _aligned(hidden_size: int, addresses: tuple[RowAddress, ...], *tensors: torch.Tensor | None) -> bool:
    if hidden_size % VECTOR:
        return False
    for address in addresses:
        if address.outer % VECTOR or address.inner % VECTOR:
            return False
    return all(t is None or t.data_ptr() % 16 == 0 for t in tensors)


def _strides(address: RowAddress, unit: int) -> tuple[int, int]:
    return address.outer // unit, address.inner // unit


def _dtype(t: torch.Tensor | None):
    return None if t is None else t.dtype


def norm_forward(x, weight, bias, spec, stats: bool, contiguous_output: bool):
    """Launch the forward of `spec`; see `hf_rmsnorm.ops` for the public function.

    Args:
        x: (..., hidden_size) of any strides, on a device that Triton serves.
        weight, bias: (hidden_size,) contiguous, or None.
        stats: also return what the backward needs.
        contiguous_output: give y in row-major order (as `F.layer_norm`) instead of x's own order (as pointwise ops).

    Returns:
        (y, rstd, mean): rstd and mean are (rows,) float32 or None; mean is None for RMSNorm.
    """
    hidden_size = x.shape[-1]
    y = torch.empty_like(
        x,
        dtype=spec.output_dtype(x.dtype, _dtype(weight)),
        memory_format=torch.contiguous_format if contiguous_output else torch.preserve_format,
    )
    rows = x.numel() // hidden_size
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device) if stats else None
    mean = torch.empty(rows, dtype=torch.float32, device=x.device) if stats and spec.centered else None
    if rows == 0:
        return y, rstd, mean
    order = _order(x, contiguous_output)
    x, address = addressable_rows(x, order)
    out = y if flat_in_order(y, order) else _flat_like(y, order)
    config = forward_config(hidden_size)
    aligned = _aligned(hidden_size, (address,), x, weight, bias)
    unit = VECTOR if aligned else 1
    rounding = _rounding(spec, weight)
    constants = (hidden_size, config.block, config.rows, unit, spec.centered, spec.weight_offset, rounding)
    kernel = NORM_FORWARD_LOOP if config.loop else NORM_FORWARD
    kernel(
        x.device,
        (-(-rows // config.rows), 1, 1),
        (x, weight, bias, out, rstd, mean, rows, address.length, *_strides(address, unit), spec.eps, *constants),
        (x.dtype, _dtype(weight), _dtype(bias), y.dtype, stats, constants),
        aligned,
        config.num_warps,
    )
    return (y if out is y else _unflatten(out, y, order)), rstd, mean


def norm_backward(dy, x, weight, bias, rstd, mean, spec, need: tuple[bool, bool, bool], contiguous_output: bool):
    """Launch the backward of `spec`.

    Args:
        dy: (..., hidden_size) of any strides; read only.
        x, weight, bias: as in the forward (bias only for its dtype).
        rstd, mean: what the forward returned.
        need: whether dx, dweight and dbias are wanted.

    Returns:
        (dx, dweight, dbias), None where not wanted; parameter gradients are deterministic, summed in float32.
    """
    hidden_size = x.shape[-1]
    rows = x.numel() // hidden_size
    need_dx, need_dw, need_db = need
    memory_format = torch.contiguous_format if contiguous_output else torch.preserve_format
    dx = torch.empty_like(x, memory_format=memory_format) if need_dx else None
    if rows == 0:
        return dx, torch.zeros_like(weight) if need_dw else None, torch.zeros_like(bias) if need_db else None
    order = _order(x, contiguous_output)
    device, x_dtype, dy_dtype = x.device, x.dtype, dy.dtype
    x, x_rows = addressable_rows(x, order)
    dy, dy_rows = addressable_rows(dy, order)
    out = dx if dx is None or flat_in_order(dx, order) else _flat_like(dx, order)
    aligned = _aligned(hidden_size, (x_rows, dy_rows), x, dy, weight)
    unit = VECTOR if aligned else 1
    strides = (dy_rows.length, *_strides(dy_rows, unit), x_rows.length, *_strides(x_rows, unit))
    rounding = _rounding(spec, weight)
    sms, shared = device_limits(device.type, device.index)
    config = backward_config(hidden_size, spec.centered, max(x.element_size(), dy.element_size()), shared)
    dtypes = (dy_dtype, x_dtype, _dtype(weight), spec.centered, need)

    def partials(needed: bool, parts: int):
        return torch.empty((parts, hidden_size), dtype=torch.float32, device=device) if needed else None

    if not config.loop:
        parts = min(-(-rows // config.rows), sms * config.programs_per_sm)
        dw, db = partials(need_dw, parts), partials(need_db, parts)
        constants = (
            hidden_size, config.block, config.rows, unit, spec.weight_offset, rounding, config.stages,
            config.reload_weight,
        )  # fmt: skip
        NORM_BACKWARD(
            device, (parts, 1, 1),
            (dy, x, weight, rstd, mean, out, dw, db, rows, *strides, *constants),
            (dtypes, constants), aligned, config.num_warps,
        )  # fmt: skip
    else:
        if need_dx:
            constants = (hidden_size, config.block, unit, spec.weight_offset, rounding)
            NORM_BACKWARD_LOOP(
                device, (rows, 1, 1), (dy, x, weight, rstd, mean, out, *strides, *constants),
                (dtypes, constants), aligned, config.num_warps,
            )  # fmt: skip
        parts = max(1, min(-(-rows // 64), 4 * sms * COLUMNS.block // hidden_size + 1))
        dw, db = partials(need_dw, parts), partials(need_db, parts)
        if need_dw or need_db:
            constants = (hidden_size, COLUMNS.block, COLUMNS.rows, unit, rounding)
            NORM_BACKWARD_COLUMNS(
                device, (-(-hidden_size // COLUMNS.block), parts, 1),
                (dy, x, weight, rstd, mean, dw, db, rows, -(-rows // parts), *strides, *constants),
                (dtypes, constants), aligned, COLUMNS.num_warps,
            )  # fmt: skip

    def reduced(partial, like):
        if partial is None:
            return None
        total = torch.empty_like(like)
        constants = (hidden_size, REDUCE.block, REDUCE.rows)
        REDUCE_PARTIALS(
            device, (-(-hidden_size // REDUCE.block), 1, 1), (partial, total, parts, *constants),
            (like.dtype, constants), hidden_size % VECTOR == 0, REDUCE.num_warps,
        )  # fmt: skip
        return total

    if dx is not None and out is not dx:
        dx = _unflatten(out, dx, order)
    return dx, reduced(dw, weight), reduced(db, bias)


def _order(x, contiguous_output):
    if contiguous_output or x.is_contiguous():
        return None
    return memory_order(tuple(x.shape), x.stride())


def _rounding(spec, weight) -> str:
    """The kernel's rounding: where the weight is float32, rounding to its dtype is no rounding."""
    if spec.rounding == "weight_dtype" and weight.dtype == torch.float32:
        return "once"
    return spec.rounding


def _flat_like(t, order):
    shape = t.shape if order is None else [t.shape[d] for d in order] + [t.shape[-1]]
    return torch.empty(shape, dtype=t.dtype, device=t.device)


def _unflatten(flat, target, order):
    """Copy rows written in `order` into target, whose strides are those that eager would return."""
    (target if order is None else target.permute(*order, -1)).copy_(flat)
    return target

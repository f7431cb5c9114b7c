"""Triton functions, the objects that start a compiled one, and the device that they run
on. The launches (`norm_launch`, `qk_launch`) bind a `Kernel` and start what that gives.
"""

import inspect
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch.utils._python_dispatch import _disable_current_modes

from . import c_launcher, counting, device
from .c_launcher import Pointers
from .failure import KernelUnavailable, failed_devices, is_of_the_device, unavailable
from .interpreter import faithful_interpreter

VECTOR = 8  # elements: 16 bytes of bf16, the widest load
INTERPRETED = not isinstance(device.load, triton.runtime.JITFunction)
INTERPRETER_SMS = 2  # small, so that the interpreter walks the persistent loops too
INTERPRETER_SHARED = 232_448
# Triton's interpreter keeps its program index in a global
_interpreter_lock = threading.RLock()


class Kernel:
    """One Triton function in its two variants.

    The aligned variant may assume that every pointer is a multiple of 16 bytes; the
    other assumes nothing. No integer is specialised on its value, so these two are all
    there is per set of compile-time constants and dtypes. The 64-bit parameters are
    strides, and arrive divided by the constant UNIT. Pointers come first among the
    parameters.

    Args:
        contracts: a product and the sum behind it may become one instruction: where the
            formula rounds no product.
        name: under which its launches are counted; by default the function's.
    """

    def __init__(self, function, contracts: bool = False, name: str = ""):
        parameters = inspect.signature(function.fn).parameters
        self.name = name or function.__name__
        self.contracts = contracts
        self.pointers = []
        self.fixed = []
        self.strides = []
        numbers = []
        for name, parameter in parameters.items():
            kind = parameter.annotation
            if name.isupper() and kind is parameter.empty:
                self.pointers.append(name)
                continue
            self.fixed.append(name)
            if kind is not tl.constexpr:
                numbers.append(name)
            if kind is tl.int64:
                self.strides.append(name)
        self.variants = {True: function, False: function}
        if INTERPRETED:
            return
        for aligned, unknown in ((True, numbers), (False, [*self.pointers, *numbers])):
            self.variants[aligned] = triton.jit(function.fn, do_not_specialize=unknown)

    def bind(
        self,
        grid: tuple[int, int, int],
        num_warps: int,
        named: dict,
        device: torch.device,
        aligned: bool,
    ) -> "BoundKernel":
        """This kernel with a grid and all arguments but the pointers.

        Args:
            named: by name, every parameter but the pointers and UNIT; strides in
                elements.
            aligned: all pointers will be multiples of 16 bytes.
        """
        if any(named[name] % VECTOR for name in ("N", *self.strides)):
            aligned = False
        unit = VECTOR if aligned else 1
        values = {**named, "UNIT": unit}
        for name in self.strides:
            values[name] = named[name] // unit
        tail = tuple(values[name] for name in self.fixed)
        return BoundKernel(self, grid, num_warps, tail, device, aligned)

    def load(
        self, bound: "BoundKernel", operands: Pointers
    ) -> Callable[[Pointers], None]:
        """Compile this kernel, load it on the current device, and return the function
        that launches it. A quicker way, if there is one, becomes ``bound.start``.
        """
        variant = self.variants[bound.aligned]
        grid = bound.grid
        tail = bound.tail
        if INTERPRETED:
            return _interpreted(variant[grid], tail)
        compiled = self.compile(bound, operands)
        try:
            launcher = compiled.run
        except Exception:
            # as in a CUDA graph that is captured; Triton would take the kernel for
            # loaded
            compiled._run = None
            raise
        if not c_launcher.KNOWN:
            options = self.options(bound)
            return lambda operands: variant[grid](*operands, *tail, **options)
        if c_launcher.is_usable(launcher):
            bound.start = c_launcher.start_by(launcher, compiled, bound)
        call = compiled[grid]
        return lambda operands: call(*operands, *tail)

    def compile(self, bound: "BoundKernel", operands: Pointers):
        """The kernel that Triton compiled for such operands, or has compiled before."""
        return self.variants[bound.aligned].warmup(
            *operands, *bound.tail, grid=bound.grid, **self.options(bound)
        )

    def options(self, bound: "BoundKernel") -> dict:
        """Triton's compile options."""
        # Not where rows are not vectorised: a thread may then have but one product of a
        # row, and would add its own unrounded and its neighbours' rounded, so that
        # threads did not agree on the sum.
        return {
            "num_warps": bound.num_warps,
            "enable_fp_fusion": bound.aligned and self.contracts,
        }


@dataclass(eq=False)
class BoundKernel:
    """A kernel with a grid and arguments that are fixed: launches hold one, or two.

    Args:
        tail: the arguments behind the pointers.
        aligned: which of the kernel's variants.

    Attributes:
        start: ``start(operands)`` starts it on these pointers, the quickest way there is. The
            first time it is compiled, or found compiled; a `KernelUnavailable` says
            that it cannot be, and nothing has run.
    """

    kernel: Kernel
    grid: tuple[int, int, int]
    num_warps: int
    tail: tuple
    device: torch.device
    aligned: bool

    def __post_init__(self):
        self.index = None if INTERPRETED else self.device.index
        self.current = _no_index
        if self.index is not None:
            self.current = current_device(self.device.type)
        self.start = self.with_care
        self._loaded = None

    def with_care(self, operands: Pointers) -> None:
        """Start the kernel, also if it is not loaded, launches are counted or watched,
        or another device is current.
        """
        if self.current() != self.index:
            with torch.get_device_module(self.device.type).device(self.device):
                return self.with_care(operands)
        if self._loaded is None:
            self._loaded = self._load(operands)
        if counting.active:
            counting.record_launch(self.kernel.name)
        self._loaded(operands)

    def _load(self, operands: Pointers) -> Callable[[Pointers], None]:
        if self.device in failed_devices:
            raise KernelUnavailable(failed_devices[self.device])
        try:
            return self.kernel.load(self, operands)
        except Exception as error:
            if is_of_the_device(error):
                raise
            raise unavailable(error) from error


def _no_index() -> None:
    """The index of a device that has none."""


def _interpreted(function: Callable, tail: Sequence) -> Callable[[Pointers], None]:
    def run(operands: Pointers) -> None:
        with _interpreter_lock, _disable_current_modes(), faithful_interpreter():
            function(*operands, *tail)

    return run


@cache
def current_device(device_type: str) -> Callable[[], int]:
    """A function of the current device's index, without torch's checks: a tensor there
    has initialised it.
    """
    if device_type == "cuda":
        return torch._C._cuda_getDevice
    return torch.get_device_module(device_type).current_device


@cache
def device_limits(device_type: str, index: int | None) -> tuple[int, int]:
    """(multiprocessors, bytes of shared memory one program may use) of a device."""
    if INTERPRETED:
        return INTERPRETER_SMS, INTERPRETER_SHARED
    properties = torch.get_device_module(device_type).get_device_properties(index)
    sms = getattr(properties, "multi_processor_count", 64)
    shared = getattr(properties, "shared_memory_per_block_optin", 0) or 65_536
    return sms, shared

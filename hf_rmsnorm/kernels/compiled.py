"""Triton functions with their arguments by name, what has been compiled of them, and the device that they run on."""

import inspect
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch.utils._python_dispatch import _disable_current_modes

from . import counting, device
from .failure import KernelUnavailable, failed, is_of_the_device, unavailable
from .interpreter import faithful_interpreter

VECTOR = 8  # elements: 16 bytes of bf16, the widest load
INTERPRETED = not isinstance(device.load, triton.runtime.JITFunction)
HIP = torch.version.hip is not None
INTERPRETER_SMS = 2  # small, so that the interpreter walks the persistent loops too
INTERPRETER_SHARED = 232_448
KNOWN_LAUNCHERS = triton.__version__.startswith(("3.7.", "3.9."))  # of which tests hold what is launched
_interpreter_lock = threading.RLock()  # Triton's interpreter keeps its program index in a global
_hooks = triton.knobs.runtime
_codes: dict = {}
_numbers = itertools.count()


@dataclass(frozen=True)
class BoundKernel:
    """All that one plan fixes of a launch; pairs are of the (unaligned, aligned) variant.

    Args:
        pack: ``pack(values[aligned], X=..., eps=...)`` are the arguments, from the operands by name.
        codes: numbers that stand for all that compiled code depends on, one for each key that was bound.
        vectorised: strides and columns allow 16-byte loads, if the pointers do too.
        ready: by code, what launches it on arguments, once it has been launched; it answers False, and has not, where
            another device is the current one. Not on AMD, where the code depends on more.
    """

    pack: Callable[..., tuple]
    values: tuple[tuple, tuple]
    codes: tuple[tuple[int, ...], tuple[int, ...]]
    grid: tuple[int, int, int]
    num_warps: int
    vectorised: bool
    ready: dict


class Kernel:
    """One Triton function in its two variants, and what has been compiled of them.

    The aligned variant may assume that every pointer is a multiple of 16 bytes; the other assumes nothing. No integer
    is specialised on its value, so these two are all there is per set of compile-time constants and dtypes. The 64-bit
    parameters are strides, and arrive divided by the constant UNIT.

    Args:
        operands: names of what each launch brings, the function's first parameter among them; those that are none of
            its parameters it does not read.
        contracts: a product and the sum behind it may become one instruction: where the formula rounds no product.
    """

    def __init__(self, function, operands: tuple[str, ...], contracts: bool = False):
        parameters = inspect.signature(function.fn).parameters
        self.name, self.contracts = function.__name__, contracts
        self._fixed = [name for name in parameters if name not in operands]
        self._constants, self._strides = (
            [name for name in self._fixed if parameters[name].annotation is kind] for kind in (tl.constexpr, tl.int64)
        )
        # Made from the names, as `collections.namedtuple` makes its `__new__`: such a call costs what the tuple costs.
        runs = [(own, list(names)) for own, names in itertools.groupby(parameters, operands.__contains__)]
        self._runs = [names for own, names in runs if not own]
        order = [", ".join(names) if own else f"*values[{i // 2}]" for i, (own, names) in enumerate(runs)]
        self._pack = eval(f"lambda values, {', '.join(operands)}: ({', '.join(order)})")
        self._compiled: dict = {}
        self._failed_on: set[torch.device] = set()
        if not INTERPRETED:
            names = [p.name for p in function.params if not p.is_constexpr]
            integers = [name for name in names if not name.isupper()]
            self._variants = {
                True: triton.jit(function.fn, do_not_specialize=integers),
                False: triton.jit(function.fn, do_not_specialize=names),
            }
        else:
            self._variants = {True: function, False: function}

    def bind(self, grid: tuple[int, int, int], num_warps: int, named: dict, *keys) -> BoundKernel:
        """A launch of all but its operands.

        Args:
            named: by name, every parameter that is no operand, but UNIT; strides in elements.
            keys: what else compiled code depends on (device, dtypes, absent operands), for each way to launch this.

        Raises:
            TypeError: a parameter is missing, or a name is none of a parameter.
        """
        unlike = {*named, "UNIT"} ^ {*self._fixed, "UNIT"}
        if unlike:
            raise TypeError(f"{self.name} is not bound by {', '.join(sorted(unlike))}")
        values, codes = [], []
        for unit in (1, VECTOR):
            each = named | {name: named[name] // unit for name in self._strides} | {"UNIT": unit}
            constants = tuple(each[name] for name in self._constants)
            values.append(tuple(tuple(each[name] for name in run) for run in self._runs))
            codes.append(tuple(_codes.setdefault((unit, key, constants), next(_numbers)) for key in keys))
        vectorised = all(named[name] % VECTOR == 0 for name in ("N", *self._strides))
        return BoundKernel(self._pack, tuple(values), tuple(codes), grid, num_warps, vectorised, {})

    def load_and_launch(
        self, device: torch.device, bound: BoundKernel, args: tuple, aligned: bool, way: int = 0, launch: bool = True
    ):
        """Call this, for whoever can compute the same in plain torch.

        Raises:
            KernelUnavailable: it could not be compiled or loaded, and nothing has run.
        """
        if device in self._failed_on and device in failed:
            raise KernelUnavailable(failed[device])
        try:
            self(device, bound, args, aligned, way, launch)
        except Exception as error:
            if self._code(bound, args, aligned, way) in self._compiled or is_of_the_device(error):
                raise
            self._failed_on.add(device)
            raise unavailable(error) from error
        self._failed_on.discard(device)

    def _code(self, bound: BoundKernel, args: tuple, aligned: bool, way: int):
        code = bound.codes[aligned][way]
        if HIP:  # there Triton addresses storage below 2 GiB by 32 bits, and compiles once more for a larger one
            return code, *(t.untyped_storage().nbytes() < 2**31 for t in args if isinstance(t, torch.Tensor))
        return code

    def __call__(
        self, device: torch.device, bound: BoundKernel, args: tuple, aligned: bool, way: int = 0, launch: bool = True
    ):
        """Launch on `device` what was bound, in this of the ways that it was bound for; or only load it for that."""
        ready = bound.ready.get(bound.codes[aligned][way])
        if ready is not None and launch and not counting.active and ready(args):
            return
        index = device.index
        if index is not None and not INTERPRETED and index != current_device(device.type)():
            with torch.get_device_module(device.type).device(device):
                self(device, bound, args, aligned, way, launch)
            return
        if counting.active and launch:
            counting.record_launch(self.name)
        if INTERPRETED:
            if not launch:
                return
            with _interpreter_lock, _disable_current_modes(), faithful_interpreter():
                self._variants[aligned][bound.grid](*args)
            return
        code = self._code(bound, args, aligned, way)
        compiled = self._compiled.get(code)
        if compiled is None:
            # Not where rows are not vectorised: a thread may then have but one product of a row, and would add its own
            # unrounded and its neighbours' rounded, so that threads did not agree on the sum.
            fused = aligned and self.contracts
            options = {"grid": bound.grid, "num_warps": bound.num_warps, "enable_fp_fusion": fused}
            kernel = self._variants[aligned].warmup(*args, **options)
            active = triton.runtime.driver.active
            try:
                described = kernel.run, active.get_current_stream, kernel.function, kernel.packed_metadata
            except Exception:  # as in a CUDA graph that is captured; Triton would take the kernel for loaded
                kernel._run = None
                raise
            compiled = self._compiled[code] = kernel, *described, active.get_current_device()
        if not launch:
            return
        ready = _ready(bound.grid, current_device(device.type), *compiled)
        ready(args)
        if not HIP:
            bound.ready[code] = ready


def _ready(grid: tuple, current: Callable[[], int], kernel, run, stream_of, function, metadata, index) -> Callable:
    (x, y, z), here, (start, given) = grid, current(), _launcher(run, metadata)

    def ready(args: tuple) -> bool:
        if current() != here:
            return False
        before, after = _hooks.launch_enter_hook, _hooks.launch_exit_hook
        if getattr(before, "calls", before) or getattr(after, "calls", after):
            kernel[grid](*args)
        else:
            start(x, y, z, stream_of(index), function, *given, args)
        return True

    return ready


def _launcher(run, metadata) -> tuple[Callable, tuple]:
    """What starts a kernel where nobody hooks launches, and what it is given between the function and its arguments.

    Quicker than kernel[grid](*args), which makes a closure, finds out the device and builds what Triton's launch hooks
    are told, each time; and, of the launchers whose code is known, than `run`, which asks for no scratch memory twice.
    """
    known = KNOWN_LAUNCHERS and type(run).__name__ == "CudaLauncher" and not getattr(run, "gsan_enabled", False)
    if known and run.global_scratch_size == run.profile_scratch_size == 0:
        given = run.launch_cooperative_grid, run.launch_pdl, metadata, *(None,) * 5
        return run.launch, (*given, run.arg_annotations, run.kernel_signature)
    return (lambda *given: run(*given[:-1], *given[-1])), (metadata, None, None, None)


@cache
def current_device(device_type: str) -> Callable[[], int]:
    """What tells the index of the current device, without torch's checks: a tensor there has initialised it."""
    known = {"cuda": "_cuda_getDevice", "xpu": "_xpu_getDevice"}.get(device_type, "")
    return getattr(torch._C, known, None) or torch.get_device_module(device_type).current_device


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
    return not pointers & 15

"""The ways to start a kernel that Triton compiled: by its launcher in C, by
``compiled[grid]``, or by Triton's whole dispatch, ``function[grid]``.

The last costs the host about three times as much, and serves where a Triton that is not
known starts kernels in another way.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch.utils._python_dispatch import _disable_current_modes

from . import counting

VERSION = triton.__version__
# Versions of which the arguments of each launch were compared with what the compiled
# code expects.
KNOWN = VERSION.startswith(("3.4.", "3.5.", "3.6.", "3.7.", "3.8.", "3.9."))
SCRATCH = None, None  # memory of the kernel, and of its profile
PROGRAMS = 4  # of the probe
STRIDE = 2**33 + 1
_knobs = triton.knobs.runtime
_trying = threading.Lock()
# by device, why its kernels are started by the dispatch, "" where they are not
_tried: dict[torch.device, str] = {}


def slow_because(device: torch.device) -> str:
    """Why kernels go through Triton's dispatch on a device, or "" where they do not.

    A Triton that is not known is tried once a device, by a small launch.

    Raises:
        Exception: any of Triton's or torch's, where the device runs no kernel.
    """
    if KNOWN:
        return ""
    with _trying:
        if device not in _tried:
            with _current(device), _disable_current_modes():
                _tried[device] = _difference(device)
        return _tried[device]


def _current(device: torch.device) -> AbstractContextManager:
    if device.index is None:
        return nullcontext()
    return torch.get_device_module(device.type).device(device)


@triton.jit(do_not_specialize=["programs", "stride", "eps"])
def probe(
    OUT, ABSENT, programs, stride: tl.int64, eps, ALL: tl.constexpr, UNIT: tl.constexpr
):
    """Each program writes its number, if all arguments are where they belong: a launch
    in a wrong way must not write elsewhere.
    """
    number = tl.program_id(0)
    arrived = (programs == ALL) & (stride == UNIT) & (eps == 0.5)
    if arrived & (number < ALL):
        tl.store(OUT + number, number + 1)


def _difference(device: torch.device) -> str:
    """How the result of `probe` differs if it is started by ``compiled[grid]``; "" if it
    does not.
    """
    expected = torch.zeros(PROGRAMS, dtype=torch.int32, device=device)
    found = torch.zeros_like(expected)
    grid = (PROGRAMS, 1, 1)
    tail = (None, PROGRAMS, STRIDE, 0.5, PROGRAMS, STRIDE)
    # Triton 3.9 warns if it is not said
    options = {"enable_fp_fusion": False}
    probe[grid](expected, *tail, **options)
    try:
        compiled = probe.warmup(found, *tail, grid=grid, **options)
        compiled[grid](found, *tail)
    except Exception as error:
        text = str(error).partition("\n")[0]
        return f"a direct launch raises {type(error).__name__}: {text}"
    if expected.all() and torch.equal(found, expected):
        return ""
    return "a direct launch computes something else"


def has_c_launcher(run) -> bool:
    """Whether a launcher of Triton's is the one for NVIDIA, of a kernel that needs no
    memory besides its operands.
    """
    if type(run).__name__ != "CudaLauncher" or getattr(run, "gsan_enabled", False):
        return False
    scratch = run.global_scratch_size, getattr(run, "profile_scratch_size", 0)
    return scratch == (0, 0)


def by_launcher(careful, compiled, run) -> Callable[[tuple], None]:
    """A function that calls the launcher in C while nothing watches launches.

    Quicker than `compiled[grid]`, which at each call asks for the device, builds the
    arguments of Triton's launch hooks and asks for scratch memory twice.

    Args:
        careful: the `Start` whose `with_care` serves otherwise.
        compiled: what Triton compiled for it.
        run: the launcher of that.
    """
    (x, y, z), tail, with_care = careful.grid, careful.tail, careful.with_care
    current = careful.current
    here = careful.index
    driver = triton.runtime.driver.active
    stream_of = driver.get_current_stream
    index = driver.get_current_device()
    start = run.launch
    fixed = _behind_the_stream(compiled, run)
    in_one_tuple = hasattr(run, "kernel_signature")

    def on(operands: tuple) -> None:
        before = _knobs.launch_enter_hook
        after = _knobs.launch_exit_hook
        watched = getattr(before, "calls", before) or getattr(after, "calls", after)
        if watched or counting.active or current() != here:
            with_care(operands)
            return
        arguments = operands + tail
        if in_one_tuple:
            arguments = (arguments,)
        start(x, y, z, stream_of(index), *fixed, *arguments)

    return on


def _behind_the_stream(compiled, run) -> tuple:
    """What a launcher in C is given between the stream and the kernel's arguments."""
    kernel = compiled.function, run.launch_cooperative_grid, run.launch_pdl
    metadata = compiled.packed_metadata
    hooks = None, None, None  # two, and their argument
    if hasattr(run, "kernel_signature"):
        parameters = run.arg_annotations, run.kernel_signature
        return (*kernel, metadata, *hooks, *SCRATCH, *parameters)
    scratch = SCRATCH
    if not hasattr(run, "profile_scratch_size"):  # Triton 3.4
        scratch = SCRATCH[:1]
    return (*kernel, *scratch, metadata, *hooks)

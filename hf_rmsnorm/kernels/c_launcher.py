"""Triton's launcher in C, by which a kernel is started in a third of the host time that
Triton's own dispatch, ``function[grid]``, takes.

A Triton that is not `KNOWN` may give that launcher other arguments. It starts kernels
by its own dispatch.
"""

from collections.abc import Callable

import triton

from ..formula import OptionalTensor
from . import counting

# the tensors of a launch, in the order of the kernel's pointers
Pointers = tuple[OptionalTensor, ...]
VERSION = triton.__version__
# Versions whose launches were compared, argument by argument, with the compiled code's
# parameters.
KNOWN = VERSION.startswith(("3.4.", "3.5.", "3.6.", "3.7.", "3.8.", "3.9."))
_SCRATCH = None, None  # memory of the kernel, and of its profile
_knobs = triton.knobs.runtime


def is_usable(launcher) -> bool:
    """Whether it is the one for NVIDIA, of a kernel that needs no memory besides its
    operands.
    """
    if type(launcher).__name__ != "CudaLauncher":
        return False
    if getattr(launcher, "gsan_enabled", False):
        return False
    profile = getattr(launcher, "profile_scratch_size", 0)
    return launcher.global_scratch_size == 0 and profile == 0


def start_by(launcher, compiled, careful) -> Callable[[Pointers], None]:
    """A function that calls the launcher in C while nothing watches launches.

    Quicker than `compiled[grid]`, which at each call asks for the device, builds the
    arguments of Triton's launch hooks and asks for scratch memory twice.

    Args:
        launcher: what Triton made for `compiled`.
        careful: the `BoundKernel` whose `with_care` serves otherwise.
    """
    x, y, z = careful.grid
    tail = careful.tail
    with_care = careful.with_care
    current = careful.current
    here = careful.index
    driver = triton.runtime.driver.active
    stream_of = driver.get_current_stream
    index = driver.get_current_device()
    start = launcher.launch
    fixed = _behind_the_stream(launcher, compiled)
    in_one_tuple = hasattr(launcher, "kernel_signature")

    def on(operands: Pointers) -> None:
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


def _behind_the_stream(launcher, compiled) -> tuple:
    """A launcher's arguments between the stream and the kernel's arguments."""
    kernel = compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl
    metadata = compiled.packed_metadata
    hooks = None, None, None  # two, and their argument
    if hasattr(launcher, "kernel_signature"):
        parameters = launcher.arg_annotations, launcher.kernel_signature
        return (*kernel, metadata, *hooks, *_SCRATCH, *parameters)
    scratch = _SCRATCH
    if not hasattr(launcher, "profile_scratch_size"):  # Triton 3.4
        scratch = _SCRATCH[:1]
    return (*kernel, *scratch, metadata, *hooks)

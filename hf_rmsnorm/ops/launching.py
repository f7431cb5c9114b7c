"""Forwards and backwards by a launch: one that is kept, or one that is made for such
operands.
"""

from collections.abc import Callable

from ..kernels.failure import KernelUnavailable
from .backend import give_up
from .direct import is_recorded
from .launches import MISSING, Launches, is_aligned, key_of


def by_kernel(
    launches: Launches, key: tuple | None, operands: tuple, make: Callable,
    options: tuple, apply: Callable | None = None, extra=None,
):  # fmt: skip
    """The results of a launch for such operands; None where no kernel serves them.

    Args:
        key: their launch key.
        make: ``make(launches, operands, aligned, *options)`` returns the launch, or
            None.
        apply: of the autograd function, where a gradient is asked for. Its first
            argument is (launches, launch, extra).
    """
    if key is None:
        return None
    try:
        launch = launches.kept.get(key, MISSING)
        if launch is MISSING:
            aligned = is_aligned(key)
            launch = launches.keep(key, make, launches, operands, aligned, *options)
        if launch is None:
            return None
        if apply is None:
            return launch.launch(*operands)
        return apply((launches, launch, extra), *operands)
    except KernelUnavailable as error:
        give_up(error, operands[0].device)
        return None


def backward_by_kernels(
    launches: Launches, kind: tuple, operands: tuple, as_read: Callable, make: Callable
) -> tuple | None:
    """The gradients by a launch for such operands; None where no kernel serves them.

    Args:
        kind: of the launch, with all that its key has besides the operands.
        operands: as the kernels take them. They are examined once for each key.
        as_read: ``as_read(kind, operands)`` returns them in the layout that the forward
            read. Hooks of saved tensors (`torch.autograd.graph.save_on_cpu`) may give
            tensors back with other strides.
        make: ``make(launches, kind, operands, aligned)`` returns the launch, or None.
    """
    key = key_of(kind, operands)
    if key is None or is_recorded():
        return None
    try:
        launch = launches.kept.get(key, MISSING)
        if launch is MISSING:
            laid_out = as_read(kind, operands)
            if any(a is not b for a, b in zip(laid_out, operands, strict=True)):
                return backward_by_kernels(launches, kind, laid_out, as_read, make)
            launch = launches.keep(key, make, launches, kind, operands, is_aligned(key))
        return None if launch is None else launch.launch(*operands)
    except KernelUnavailable as error:
        give_up(error, operands[0].device)
        return None


def require_unchanged(device, expected: dict) -> None:
    """Compare what a forward has read with what it was: name -> (tensor, its shape).

    ``weight.data = torch.empty(0)``, as offloading by hand does, changes a saved
    tensor, and autograd does not notice. A kernel would read past its end.

    Raises:
        RuntimeError: one has another shape or device.
    """
    for name, (t, shape) in expected.items():
        if t is None or (t.shape == shape and t.device == device):
            continue
        raise RuntimeError(
            f"{name} changed between forward and backward: the backward expects shape {tuple(shape)} on {device}, "
            f"and finds {tuple(t.shape)} on {t.device}; keep what a forward has read as it is until its backward "
            "has run"
        )

"""Which calls start a kernel directly: those on plain tensors, in a thread where
nothing watches the operators.
"""

import torch
from torch import Tensor
from torch._C import (
    _are_functorch_transforms_active,
    _get_dispatch_mode,
    _is_tracing,
    _len_torch_dispatch_stack,
    _TorchDispatchModeKey,
)
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from .settings import chosen

DIRECT_TYPES = (Tensor, Parameter)


def autocast_enabled(device_type: str) -> bool:
    """Whether autocast is on for this type of device; not for one that has no autocast,
    as meta.
    """
    try:
        return torch.is_autocast_enabled(device_type)
    except RuntimeError:  # unknown device type for autocast
        return False


def is_recorded() -> bool:
    """Whether a mode that records or fakes operators is active; one that merely watches
    them does not count.
    """
    if not _len_torch_dispatch_stack():
        return False
    keys = _TorchDispatchModeKey
    recording = keys.FAKE, keys.PROXY, keys.FUNCTIONAL
    return any(_get_dispatch_mode(key) is not None for key in recording)


def under_transform() -> bool:
    """Whether functorch, forward-mode AD or torch.jit.trace is at work: they need
    operators they can see through.
    """
    return (
        _are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or _is_tracing()
    )


def starts_kernels(x: Tensor) -> bool:
    """Whether a call on x, in this thread as it is now, may start a kernel instead of
    calling operators. Not while compiling.
    """
    if chosen.backend == "reference" or is_recorded() or under_transform():
        return False
    # what functorch has left behind has no memory, and a nested tensor has no shape
    return not (is_functorch_wrapped_tensor(x) or x.is_nested)


def any_requires_grad(tensors: tuple) -> bool:
    for t in tensors:
        if t is None:
            continue
        if t.requires_grad:
            return True
    return False


def present(*tensors: Tensor | None) -> list:
    """The tensors that are there."""
    return [t for t in tensors if t is not None]


def row_major(*tensors: Tensor | None) -> list:
    """The tensors, those with gaps copied."""
    return [t if t is None else t.contiguous() for t in tensors]


def version(t: Tensor | None) -> int | None:
    """What every write to a tensor moves that is not past autograd; None where it has
    none.
    """
    return None if t is None or t.is_inference() else t._version

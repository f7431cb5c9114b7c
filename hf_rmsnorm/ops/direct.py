"""Which calls start a kernel directly: those on plain tensors, in a thread where
nothing has to see the operators.
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
from torch.autograd import forward_ad
from torch.nn import Parameter

from .settings import chosen

DIRECT_TYPES = (Tensor, Parameter)
# Whether autocast is on for any type of device. It takes a fifth of the time in which
# torch answers that of one type.
autocast_anywhere = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


def autocast_enabled(device_type: str) -> bool:
    """Whether autocast is on for this type of device; not for one that has no autocast,
    as meta.
    """
    try:
        return torch.is_autocast_enabled(device_type)
    except RuntimeError:  # unknown device type for autocast
        return False


def under_transform() -> bool:
    """Whether functorch, forward-mode AD or torch.jit.trace is at work: they need
    operators they can see through.
    """
    return (
        _are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or _is_tracing()
    )


def operators_are_seen() -> bool:
    """Whether something in this thread has to see the operators that a call is made of:
    a transform, or a mode that records or fakes them. One that merely watches does not.
    """
    if _len_torch_dispatch_stack():
        keys = _TorchDispatchModeKey
        recording = keys.FAKE, keys.PROXY, keys.FUNCTIONAL
        if any(_get_dispatch_mode(key) is not None for key in recording):
            return True
    return under_transform()


def starts_kernels() -> bool:
    """Whether a call in this thread, as it is now, may start a kernel instead of
    calling operators. It is not asked while compiling.
    """
    return chosen.backend != "reference" and not operators_are_seen()


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
    """The number of writes in place to a tensor, without those through ``.data``. None
    for no tensor, or one of inference mode.
    """
    return None if t is None or t.is_inference() else t._version

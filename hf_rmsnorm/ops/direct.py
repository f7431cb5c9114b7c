"""Which calls start a kernel directly: those on plain tensors, in a thread where
nothing watches the operators.
"""

import torch
from torch.autograd import forward_ad
from torch.nn import Parameter

from .settings import chosen

DIRECT_TYPES = (torch.Tensor, Parameter)

_is_compiling = torch.compiler.is_compiling
_functorch_active = torch._C._are_functorch_transforms_active
_is_tracing = torch._C._is_tracing
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_count_modes = torch._C._len_torch_dispatch_stack


def autocast_enabled(device_type: str) -> bool:
    """Whether autocast is on for this type of device; not for one that has no autocast,
    as meta.
    """
    try:
        return torch.is_autocast_enabled(device_type)
    except RuntimeError:  # unknown device type for autocast
        return False


def is_direct(*tensors: torch.Tensor | None) -> bool:
    """Whether a kernel may read these tensors' memory: none is of a subclass, and
    nothing records the operators.
    """
    plain = all(t is None or type(t) in DIRECT_TYPES for t in tensors)
    return plain and not is_recorded()


def is_recorded() -> bool:
    """Whether a mode that records or fakes operators is active; one that merely watches
    them does not count.
    """
    if not _count_modes():
        return False
    keys = torch._C._TorchDispatchModeKey
    return any(
        torch._C._get_dispatch_mode(k) is not None
        for k in (keys.FAKE, keys.PROXY, keys.FUNCTIONAL)
    )


def starts_kernels(x: torch.Tensor) -> bool:
    """Whether an eager call on x, in this thread as it is now, may start a kernel
    instead of calling operators.
    """
    return (
        not _is_compiling()
        and type(x) in DIRECT_TYPES
        and chosen.backend != "reference"
        and not (_count_modes() and is_recorded())
        and not (_functorch_active() or forward_ad._current_level >= 0 or _is_tracing())
        and not _is_wrapped(x)  # what functorch has left behind, which has no memory
    )


def under_transform() -> bool:
    """Whether functorch, forward-mode AD or torch.jit.trace is at work: they need
    operators they can see through.
    """
    return _functorch_active() or forward_ad._current_level >= 0 or _is_tracing()


def asks_by_parameters_alone(graded: bool, *summands: torch.Tensor | None) -> bool:
    """Whether a norm asks for gradients and none of the summands in front of it does.

    In one launch the sum would ask for gradients too, which it does not in the model.
    """
    return graded and not any(t is not None and t.requires_grad for t in summands)


def row_major(*tensors: torch.Tensor | None) -> list:
    """The tensors, those with gaps copied."""
    return [t if t is None or t.is_contiguous() else t.contiguous() for t in tensors]


def version(t: torch.Tensor | None) -> int | None:
    """What every write to a tensor moves that is not past autograd; None where it has
    none.
    """
    return None if t is None or t.is_inference() else t._version

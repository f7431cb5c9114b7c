"""The direct launch: which calls need no dispatcher, and what is kept of them so that the next like them are quick."""

import weakref
from collections.abc import Callable
from functools import cache

import torch
from torch.autograd import forward_ad
from torch.nn import Parameter

from ..kernels.failure import KernelUnavailable
from .settings import chosen

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:
    TensorGuards = None

DIRECT_TYPES = (torch.Tensor, Parameter)

_is_compiling = torch.compiler.is_compiling
_functorch_active = torch._C._are_functorch_transforms_active
_is_tracing = torch._C._is_tracing
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_cuda_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", bool)  # which torch.cuda's own calls
_count_modes = torch._C._len_torch_dispatch_stack
_autocast_anywhere = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


def autocast_enabled(device_type: str) -> bool:
    """Whether autocast is on for this type of device; not for one that has no autocast, as meta."""
    try:
        return torch.is_autocast_enabled(device_type)
    except RuntimeError:  # unknown device type for autocast
        return False


def is_direct(*tensors: torch.Tensor | None) -> bool:
    """Whether a kernel may read these tensors' memory directly: no subclass, and nobody recording the operators."""
    for t in tensors:
        if t is not None and type(t) not in DIRECT_TYPES:
            return False
    return not (_count_modes() and _recorded())


def _recorded() -> bool:
    """Whether a mode that records or fakes operators is active; one that merely watches them does not count."""
    keys = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(k) is not None for k in (keys.FAKE, keys.PROXY, keys.FUNCTIONAL))


@cache
def _is_capturing(device_type: str) -> Callable[[], bool]:
    """What tells whether a graph is captured of the current stream; `bool()` is False."""
    return getattr(getattr(torch, device_type, None), "is_current_stream_capturing", bool)


def capturing(t: torch.Tensor) -> bool:
    """Whether a graph is captured on the device of a tensor: what is launched now runs again, on other values."""
    return _cuda_capturing() if t.is_cuda else not t.is_cpu and _is_capturing(t.device.type)()


def version(t: torch.Tensor | None) -> int | None:
    """What every write to a tensor moves that is not past autograd; None where it has none."""
    return None if t is None or t.is_inference() else t._version


def state(t: torch.Tensor | None) -> tuple | None:
    """The version and the address, which ``.data = other`` moves alone."""
    return None if t is None else (version(t), t.data_ptr() if type(t) in DIRECT_TYPES else 0)


def under_transform() -> bool:
    """Whether functorch, forward-mode AD or torch.jit.trace is at work: they need operators they can see through."""
    return _functorch_active() or forward_ad._current_level >= 0 or _is_tracing()


_caches: list[weakref.ref] = []


class LaunchCache(dict):
    """Plans of calls that the kernels serve, by their `launch_key`: the next such call skips the checks.

    Each cache is for one formula (whose eps may differ) that has a weight and a bias, or has not, in all calls.

    Attributes:
        last: by the shape of x, what tells whether operands are like those of the last call that was found here, and
            its key and plan.
        recent: the same of the last call of a module, whatever its shape; for its forward to keep.
    """

    MOST = 8_192  # generation with a growing prompt makes one per length

    def __init__(self):
        _caches.append(weakref.ref(self, _caches.remove))
        self._alike: dict[tuple, Callable] = {}
        self.last: dict[torch.Size, tuple] = {}
        self.recent = NOTHING

    def clear(self):
        self.recent = NOTHING
        for each in (super(), self._alike, self.last):
            each.clear()

    def keep(self, key: tuple, backend: str, make: Callable, *operands):
        """The plan ``make(*operands)`` of a call, kept by its key; None where another backend serves it.

        None too where the launch code cannot be loaded: who launches without a plan finds that out, and says it.
        """
        if backend != "triton":
            return None
        if len(self) >= self.MOST:
            self.clear()
        try:
            plan = self[key] = make(*operands)
        except KernelUnavailable:
            return None
        return plan

    def find(self, x: torch.Tensor, weight, bias, functional: bool) -> tuple:
        """(key, plan) of a call that nobody compiles: plan is None where none is kept, key too where none can be."""
        if type(x) not in DIRECT_TYPES or (functional and _autocast_anywhere() and autocast_enabled(x.device.type)):
            return None, None
        try:
            found = alike, key, plan = self.last.get(x.shape, NOTHING)
        except TypeError:  # symbolic sizes, of a tensor that functorch has wrapped
            return None, None
        if (alike(x, weight) if bias is None else alike(x, weight, bias)) and not is_watched():
            return key, plan
        key = launch_key(x, weight, bias, functional)
        plan = None if key is None else self.get(key)
        if plan is not None:
            before, known = found[1], self._alike.get(key)
            if known is None or before == key:  # or made under other modes, autocast or gradients say
                check = alike_to([t for t in (x, weight, bias) if t is not None])
                known = self._alike[key] = check if weight is not None else lambda x, _, *bias: check(x, *bias)
            self.last[x.shape] = known, key, plan
        return key, plan


def forget_plans() -> None:
    """Empty every launch cache: each call is asked anew what serves it."""
    for reference in list(_caches):
        plans = reference()
        if plans is not None:
            plans.clear()


def is_watched() -> bool:
    """Whether the kernels are not wanted, or something may see or change operators; `alike_to` cannot tell of this."""
    return bool(_count_modes()) or chosen.backend == "reference" or _is_tracing() or forward_ad._current_level >= 0


def _unlike(*_) -> bool:
    return False


NOTHING = _unlike, None, None


def alike_to(tensors: list[torch.Tensor]) -> Callable[..., bool]:
    """What tells whether as many tensors have the types, dtypes, devices, shapes and strides of these, one by one.

    It is what Dynamo guards its graphs by, quicker than any key. A tensor is another under functorch, autocast or
    `inference_mode` than outside of it.
    """
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    try:
        return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    except Exception:  # a private part of torch, without which calls are found by their keys
        return _unlike


def launch_key(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, functional: bool
) -> tuple | None:
    """What decides how operands like these are served; None where that is to be found out anew each time."""
    if (
        chosen.backend == "reference"
        or _is_compiling()
        or type(x) not in DIRECT_TYPES
        or _count_modes()
        or under_transform()
        or _is_wrapped(x)  # what functorch has left behind, which autograd.Function unwraps
        or (functional and _autocast_anywhere() and autocast_enabled(x.device.type))
    ):
        return None
    if weight is None:
        key = x.shape, x.stride(), x.dtype, x.device, None
    elif type(weight) in DIRECT_TYPES and weight.is_contiguous():
        key = x.shape, x.stride(), x.dtype, x.device, weight.shape, weight.dtype, weight.device
    else:
        return None
    if bias is not None:
        if type(bias) not in DIRECT_TYPES or not bias.is_contiguous():
            return None
        key += (bias.shape, bias.dtype, bias.device)
    return key

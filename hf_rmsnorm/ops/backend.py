"""Which implementation serves a call: the Triton kernels, the plain-torch formula, or the layer's own forward."""

from __future__ import annotations

import os
import threading
import weakref
from functools import cache
from importlib.util import find_spec

import torch
from torch.autograd import forward_ad
from torch.nn import Parameter

from ..formula import NormSpec
from ..kernels.sizes import MAX_HIDDEN_SIZE, TILE_MAX
from .recompute import same_as_forward
from .settings import settings

BACKENDS = ("auto", "triton", "reference")
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_ROWS = 2**31 - 2**16  # row numbers are 32-bit, and the last tile may reach past the last row
MAX_HEADS = 2**16 - 1  # the second dimension of a CUDA grid
PLAIN_TYPES = (torch.Tensor, Parameter)

_is_compiling = torch.compiler.is_compiling
_functorch_active = torch._C._are_functorch_transforms_active
_is_tracing = torch._C._is_tracing
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_count_modes = torch._C._len_torch_dispatch_stack


class _Choice(threading.local):
    name = "auto"


_choice = _Choice()
_used = False  # whether `use_backend` ever chose another: before that no two calls can differ


class use_backend:
    """Choose, in this thread and inside the ``with``, what computes the norms.

    Args:
        name: ``"auto"`` launches Triton on devices it serves (and anywhere under ``TRITON_INTERPRET=1``); elsewhere
            a patched module runs its own original forward. ``"triton"`` insists on the kernels and raises where they
            cannot run. ``"reference"`` computes the plain-torch formula everywhere.

    Raises:
        ValueError: the name is none of these.

    A backward uses the backend that its forward used. A recompute under activation checkpointing must run under the
    same one, and raises otherwise: keep ``loss.backward()`` inside the ``with``.

    Example:
        >>> import torch
        >>> from hf_rmsnorm import rms_norm, use_backend
        >>> with use_backend("reference"):
        ...     rms_norm(torch.tensor([1.0, 2.0, 3.0, 4.0]), eps=0.0)
        tensor([0.3651, 0.7303, 1.0954, 1.4606])
    """

    def __init__(self, name: str):
        if name not in BACKENDS:
            raise ValueError(f"use_backend({name!r}): no such backend, choose one of {', '.join(BACKENDS)}")
        self.name = name
        self._previous = []

    def __enter__(self):
        global _used
        _used = _used or self.name != "auto"
        self._previous.append(_choice.name)
        _choice.name = self.name
        return self

    def __exit__(self, *exc):
        _choice.name = self._previous.pop()


def chosen_backend() -> str:
    """What `use_backend` has chosen in this thread; ``"auto"`` outside of one."""
    return _choice.name


@cache
def _device_refusal(device_type: str, index: int | None) -> str | None:
    if find_spec("triton") is None:
        return "triton is not installed"
    if device_type == "meta":
        return "meta tensors hold no data"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if device_type == "cuda":
        if torch.version.hip is None and torch.cuda.get_device_capability(index) < (8, 0):
            return f"this GPU has compute capability {torch.cuda.get_device_capability(index)}; Triton needs 8.0"
        return None
    if device_type == "xpu":
        return None
    return f"Triton has no backend for {device_type} tensors"


@cache
def kernels():
    """The launch code, which needs triton."""
    from ..kernels import launch

    return launch


@torch.compiler.assume_constant_result
def device_refusal(device_type: str, index: int | None = None) -> str | None:
    """Why Triton kernels cannot run on a device, or None where they can."""
    return _device_refusal(device_type, index)


def describe_backend(device: torch.device | str) -> tuple[str, str]:
    """What ``auto`` does on a device: ("triton" or "original", the reason in words)."""
    device = torch.device(device)
    refusal = device_refusal(device.type, device.index)
    if refusal is not None:
        return "original", f"{refusal}: patched modules run their own forward"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "triton", "TRITON_INTERPRET=1: kernels run in Triton's interpreter, exact but slow"
    return "triton", f"Triton compiles for {device.type}"


def refusal(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    spec: NormSpec,
    gate: torch.Tensor | None = None,
) -> str | None:
    """Why the kernels do not serve this call, or None where they do."""
    dtype, shape, device, group_size = x.dtype, x.shape, x.device, spec.group_size
    if dtype not in KERNEL_DTYPES:
        return f"x is {dtype}; the kernels serve float32, float16 and bfloat16"
    if not shape or not 1 <= shape[-1] <= MAX_HIDDEN_SIZE:
        return f"the last dimension of x, shape {tuple(shape)}, is not between 1 and {MAX_HIDDEN_SIZE}"
    if group_size is not None and (shape[-1] % group_size or group_size > TILE_MAX):
        return f"groups of {group_size} do not divide rows of {shape[-1]}, or hold more than {TILE_MAX}"
    if spec.weight_first and (group_size or shape[-1]) > TILE_MAX:
        return f"x has {shape[-1]} columns; norms whose weight comes first are served up to {TILE_MAX}"
    for parameter in (weight, bias):
        if parameter is None:
            continue
        name = "weight" if parameter is weight else "bias"
        if parameter.dtype not in KERNEL_DTYPES:
            return f"{name} is {parameter.dtype}; the kernels serve float32, float16 and bfloat16"
        if parameter.dim() != 1 or parameter.shape[0] != shape[-1]:
            if parameter.dim() != 2 or parameter.shape != shape[-2:]:
                return f"{name} has shape {tuple(parameter.shape)} where x has {shape[-1]} columns"
            if not 0 < parameter.shape[0] <= MAX_HEADS or shape[-1] > TILE_MAX or group_size is not None:
                return f"{name} of shape {tuple(parameter.shape)} has too many rows or columns"
            if any(p is not None and p.shape != parameter.shape for p in (weight, bias)):
                return "weight and bias differ in shape"
        if parameter.device != device:
            return f"{name} is on {parameter.device} and x on {device}: move one of them"
    if gate is not None:
        if gate.dtype not in KERNEL_DTYPES or gate.shape != shape or gate.device != device:
            return f"gate is {gate.dtype} of shape {tuple(gate.shape)} on {gate.device}, x {tuple(shape)} on {device}"
        if (group_size or shape[-1]) > TILE_MAX:
            return f"x has {shape[-1]} columns; gated norms are served up to {TILE_MAX}"
    # Heads multiply the rows that the last tile may reach past the end.
    most = MAX_ROWS if group_size is None and (weight is None or weight.dim() == 1) else MAX_ROWS // 2
    # Not while compiling: it would bound a dynamic batch, and the operator asks again at run time.
    if not _is_compiling() and x.numel() > most and x.numel() // (group_size or shape[-1]) > most:
        return f"x has more than {most} rows"
    return device_refusal(device.type, device.index)


def resolve_backend(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    spec: NormSpec,
    gate: torch.Tensor | None = None,
) -> str:
    """``"triton"``, ``"reference"``, or ``"original"`` where ``auto`` leaves the call to the layer's own forward.

    Raises:
        RuntimeError: ``use_backend("triton")`` is in force and the kernels cannot serve the call; or this is the
            recompute of a checkpointed forward that ran under another backend.
    """
    choice = _choice.name
    if choice == "reference":
        backend = "reference"
    elif choice == "auto" and settings.while_compiling == "formula" and _is_compiling():
        backend = "original"
    else:
        reason = refusal(x, weight, bias, spec, gate)
        if reason is None:
            backend = "triton"
        elif choice == "triton":
            raise RuntimeError(f"use_backend('triton'): {reason}")
        else:
            backend = "original"
    if _used and not _is_compiling():

        def automatic() -> str:
            return "triton" if refusal(x, weight, bias, spec, gate) is None else "original"

        backend = same_as_forward(backend, choice != "auto", automatic, weight)
    return backend


def plain(*tensors: torch.Tensor | None) -> bool:
    """Whether a kernel may read these tensors' memory directly: no subclass, and nobody tracing the operators."""
    for t in tensors:
        if t is not None and type(t) not in PLAIN_TYPES:
            return False
    return not (_count_modes() and _traced())


def _traced() -> bool:
    """Whether a mode that records or fakes operators is active; one that merely watches them does not count."""
    keys = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(k) is not None for k in (keys.FAKE, keys.PROXY, keys.FUNCTIONAL))


def transformed() -> bool:
    """Whether functorch, forward-mode AD or torch.jit.trace is at work: they need operators they can see through."""
    return _functorch_active() or forward_ad._current_level >= 0 or _is_tracing()


class Plans(dict):
    """Launches of calls that the kernels serve, by the likeness of their operands: the next such call skips the checks.

    Each is for one formula (whose eps may differ) that has a weight and a bias, or has not, in all calls.
    """

    _all: weakref.WeakSet = weakref.WeakSet()
    MOST = 8_192  # generation with a growing prompt makes one per length

    __hash__ = object.__hash__

    def __init__(self):
        self._all.add(self)

    def keep(self, like: tuple, plan):
        if len(self) >= self.MOST:
            self.clear()
        self[like] = plan
        return plan

    @classmethod
    def forget(cls) -> None:
        """Drop them all, where what serves a device has changed."""
        for plans in list(cls._all):
            plans.clear()


def likeness(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, functional: bool) -> tuple | None:
    """What decides how operands like these are served; None where that is to be found out anew each time."""
    if (
        _used
        or _is_compiling()
        or type(x) not in PLAIN_TYPES
        or _count_modes()
        or transformed()
        or _is_wrapped(x)  # what functorch has left behind, which autograd.Function unwraps
        or (functional and torch.is_autocast_enabled(x.device.type))
    ):
        return None
    if weight is None:
        like = x.shape, x.stride(), x.dtype, x.device, None
    elif type(weight) in PLAIN_TYPES and weight.is_contiguous():
        like = x.shape, x.stride(), x.dtype, x.device, weight.shape, weight.dtype, weight.device
    else:
        return None
    if bias is not None:
        if type(bias) not in PLAIN_TYPES or not bias.is_contiguous():
            return None
        like += (bias.shape, bias.dtype, bias.device)
    return like

"""Chooses what computes a call: the Triton kernels, the formula in plain torch, or the
module's own forward.

Devices, the thread and compilers decide that here; tensors do in `limits`.
"""

import os
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec

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
from torch.compiler import assume_constant_result, is_compiling, is_exporting

from ..formula import TORCH_RELEASE, NormSpec
from ..kernels.failure import left_devices
from .settings import chosen, settings

DIRECT = "direct"  # how kernels are started
# Whether autocast is on for any type of device. It takes a fifth of the time in which
# torch answers that of one type.
autocast_anywhere = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
_lists_rms_norm = TORCH_RELEASE >= (2, 12)


def interprets() -> bool:
    """Whether Triton's interpreter runs the kernels, on any device."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _device_refusal(device_type: str, index: int | None) -> str | None:
    if find_spec("triton") is None:
        return "triton is not installed"
    if device_type == "meta":
        return "meta tensors hold no data"
    if interprets():
        return None
    if device_type == "cuda":
        if torch.version.hip is None:
            return _nvidia_refusal(index)
        return None
    if device_type == "xpu":
        return None
    return f"Triton has no backend for {device_type}"


def _nvidia_refusal(index: int | None) -> str | None:
    capability = torch.cuda.get_device_capability(index)
    if capability >= (7, 5):
        return None
    if capability == (7, 0) and "sm_70" in torch.cuda.get_arch_list():
        # a V100: newer builds of torch leave it out
        return None
    major, minor = capability
    return (
        f"this GPU has compute capability {major}.{minor}; the kernels serve 7.5 (T4, RTX 20) and newer, "
        "and a V100 with a torch built for sm_70"
    )


@assume_constant_result
def device_refusal(device_type: str, index: int | None = None) -> str | None:
    """Why Triton kernels cannot run on a device, or None where they can."""
    return left_devices.get((device_type, index)) or _device_refusal(device_type, index)


def left_alone(x: Tensor) -> bool:
    """Whether the default backend leaves x's device to plain torch. Each forward on a CPU
    asks this first.
    """
    if chosen.backend != "auto" or type(x) is not Tensor:
        return False
    if x.is_cpu:  # to ask a device for its type takes a quarter of a microsecond
        return device_refusal("cpu") is not None
    device = x.device
    return device_refusal(device.type, device.index) is not None


def runs_on(device: torch.device | str) -> dict:
    """What computes patched norms on a device by default. Reports, the callback and
    every command print this.

    Returns:
        ``"device"``; ``"backend"``, which is ``"triton"`` or ``"original"``; and
        ``"reason"``, the same in words.
    """
    device = torch.device(device)
    refusal = device_refusal(device.type, device.index)
    backend = "triton"
    reason = "fused Triton kernels"
    if refusal is not None:
        backend = "original"
        reason = f"plain PyTorch ({refusal})"
    elif interprets():
        reason = "Triton kernels in Triton's interpreter, exact but slow"
    else:
        launches = launch_path()
        if launches != DIRECT:
            reason += f", launched {launches}"
    return {"device": str(device), "backend": backend, "reason": reason}


def launch_path() -> str:
    """How kernels are started, in words: `DIRECT`, or why not."""
    if find_spec("triton") is None:
        return "none, as triton is not installed"
    if interprets():
        return "by Triton's interpreter"
    from ..kernels import c_launcher

    if c_launcher.KNOWN:
        return DIRECT
    return (
        "through Triton's dispatch, about three times the host time: "
        f"upgrade hf-rmsnorm, which does not know Triton {c_launcher.VERSION}"
    )


def where_norms_run(records: Iterable[dict]) -> list[str]:
    """A sentence for all devices of `runs_on` records where the same computes the
    norms.
    """
    by_reason = {}
    for record in records:
        devices = by_reason.setdefault(record["reason"], [])
        devices.append(record["device"])
    sentences = []
    for reason, devices in by_reason.items():
        names = ", ".join(devices)
        sentences.append(f"{names}: {reason}")
    return sentences


@assume_constant_result
# asked of Dynamo itself, before torch 2.13, it is True in whatever is compiled
def _is_exporting() -> bool:
    return is_exporting()


def is_exported() -> bool:
    """Whether a graph is made that runs elsewhere, perhaps without this package."""
    if is_compiling():
        return _is_exporting()
    return _is_tracing()


def compiles_original() -> bool:
    """Whether a graph is being compiled that holds the model's own code."""
    return (
        is_compiling()
        and settings.while_compiling == "original"
        and chosen.backend == "auto"
    )


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


def host_may_wait(is_cuda: bool) -> bool:
    """Whether the host may wait for a device now: no CUDA graph is captured, and torch
    does not watch for synchronisation.
    """
    if not is_cuda:
        return True
    is_watched = torch.cuda.get_sync_debug_mode()
    return not (is_watched or torch.cuda.is_current_stream_capturing())


def autocasts_functional(spec: NormSpec, device_type: str) -> bool:
    """Whether F.layer_norm, or F.rms_norm, computes in float32: is it on an
    accelerator's autocast list for that?
    """
    return (
        device_type != "cpu"
        and autocast_enabled(device_type)
        and (spec.centered or _lists_rms_norm)
    )

"""Which implementation serves a call: the Triton kernels, the plain-torch formula, or the layer's own forward."""

import os
import threading
import warnings
from functools import cache, partial
from importlib.util import find_spec

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..formula import NormSpec
from ..kernels.failure import KernelUnavailable, failed
from ..kernels.serves import unserved
from ..kernels.sizes import MAX_HEAD_DIM, MAX_HIDDEN_SIZE, MAX_TOKEN, next_power_of_2
from .direct import DIRECT_TYPES, forget_plans
from .loading import is_dtensor
from .settings import chosen, insists, settings

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_ROWS = 2**31 - 2**16  # row numbers are 32-bit, and the last tile may reach past the last row
MAX_HEADS = 2**16 - 1  # the second dimension of a CUDA grid

_is_compiling = torch.compiler.is_compiling
_Tensor = torch.Tensor
_is_tracing = torch._C._is_tracing
_left: dict[tuple, str] = {}  # devices whose kernels cannot be loaded, (type, index), and why
_failing = threading.Lock()


@cache
def _device_refusal(device_type: str, index: int | None) -> str | None:
    if find_spec("triton") is None:
        return "triton is not installed"
    if device_type == "meta":
        return "meta tensors hold no data"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if device_type == "cuda":
        return _nvidia_refusal(index) if torch.version.hip is None else None
    if device_type == "xpu":
        return None
    return f"Triton has no backend for {device_type} tensors"


def _nvidia_refusal(index: int | None) -> str | None:
    capability = torch.cuda.get_device_capability(index)
    if capability >= (7, 5):
        return None
    if capability == (7, 0) and "sm_70" in torch.cuda.get_arch_list():  # a V100: newer builds of torch leave it out
        return None
    number = ".".join(map(str, capability))
    served = "7.5 (T4, RTX 20) and newer, and a V100 with a torch built for sm_70"
    return f"this GPU has compute capability {number}; the kernels serve {served}"


@torch.compiler.assume_constant_result
def device_refusal(device_type: str, index: int | None = None) -> str | None:
    """Why Triton kernels cannot run on a device, or None where they can."""
    if _left and (device_type, index) in _left:
        return _left[device_type, index]
    return _device_refusal(device_type, index)


def give_up(error: KernelUnavailable, device: torch.device) -> None:
    """Leave a device to plain torch from now on, as its kernels cannot be loaded; a warning says so once.

    Within a backward, forwards are left when it ends: a checkpoint runs some of them again, as they were.

    Raises:
        KernelUnavailable: the error, where `use_backend("triton")` insists on the kernels.
    """
    if insists():
        raise error
    with _failing:
        first = device not in failed
        failed.setdefault(device, str(error))
    if torch._C._current_graph_task_id() == -1:
        _leave(device)
    else:
        torch.autograd.Variable._execution_engine.queue_callback(partial(_leave, device))
    if first:
        then = f"On {device} patched modules run their own forward from now on; after the cure, start Python again."
        warnings.warn(f"hf_rmsnorm: {error}\n{then}", stacklevel=2)


def _leave(device: torch.device) -> None:
    _left[device.type, device.index] = "; ".join(failed[device].splitlines())
    forget_plans()


def left_alone(x: torch.Tensor) -> bool:
    """Whether nothing but a module's own forward serves x where it is; what every call asks first, and so little."""
    if chosen.backend != "auto" or type(x) is not _Tensor:
        return False
    return (device_refusal("cpu") if x.is_cpu else device_refusal(x.device.type, x.device.index)) is not None


def describe_backend(device: torch.device | str) -> tuple[str, str]:
    """What ``auto`` does on a device: ("triton" or "original", the reason in words)."""
    device = torch.device(device)
    refusal = device_refusal(device.type, device.index)
    if refusal is not None:
        return "original", f"{refusal}: patched modules run their own forward"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "triton", "TRITON_INTERPRET=1: kernels run in Triton's interpreter, exact but slow"
    return "triton", f"Triton compiles the kernels for {device.type}"


def runs_on(device: torch.device | str) -> dict[str, str]:
    """The same as a record, of which a list tells of several devices."""
    return dict(zip(("device", "backend", "reason"), (str(device), *describe_backend(device)), strict=True))


@torch.compiler.assume_constant_result
def _is_exporting() -> bool:  # asked of Dynamo itself, before torch 2.13, it is True in whatever is compiled
    return torch.compiler.is_exporting()


def _is_exported() -> bool:
    """Whether a graph is made that runs elsewhere, perhaps without this package."""
    return _is_exporting() if _is_compiling() else _is_tracing()


def refusal(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    spec: NormSpec,
    gate: torch.Tensor | None = None,
) -> str | None:
    """Why the kernels do not serve this call, or None where they do."""
    if x.is_nested:
        return "x is a nested tensor"
    dtype, shape, device, group_size = x.dtype, x.shape, x.device, spec.group_size
    of_heads = any(p is not None and p.dim() == 2 for p in (weight, bias))
    if dtype not in KERNEL_DTYPES:
        return f"x is {dtype}; the kernels serve float32, float16 and bfloat16"
    if not shape or not 1 <= shape[-1] <= MAX_HIDDEN_SIZE:
        return f"the last dimension of x, shape {tuple(shape)}, is not between 1 and {MAX_HIDDEN_SIZE}"
    if group_size is not None and shape[-1] % group_size:
        return f"groups of {group_size} do not divide rows of {shape[-1]}"
    formula, columns = (spec, shape[-1]) if group_size is None else (spec.ungrouped, group_size)
    missing = unserved(formula, "rows")
    if missing is not None:
        return f"{missing}, which the kernels do not compute"
    if (gate is None) != (spec.gate is None):
        return "its formula has a gate and the call has none, or the other way round"
    for parameter in (weight, bias):
        if parameter is None:
            continue
        name = "weight" if parameter is weight else "bias"
        if parameter.dtype not in KERNEL_DTYPES:
            return f"{name} is {parameter.dtype}; the kernels serve float32, float16 and bfloat16"
        if parameter.dim() != 1 or parameter.shape[0] != shape[-1]:
            if parameter.dim() != 2 or parameter.shape != shape[-2:]:
                return f"{name} has shape {tuple(parameter.shape)} where x has {shape[-1]} columns"
            if not 0 < parameter.shape[0] <= MAX_HEADS or group_size is not None:
                return f"{name} of shape {tuple(parameter.shape)} has too many rows"
            if any(p is not None and p.shape != parameter.shape for p in (weight, bias)):
                return "weight and bias differ in shape"
        if parameter.device != device:
            return f"{name} is on {parameter.device} and x on {device}: move one of them"
    if gate is not None and (gate.dtype not in KERNEL_DTYPES or gate.shape != shape or gate.device != device):
        return f"gate is {gate.dtype} of shape {tuple(gate.shape)} on {gate.device}, x {tuple(shape)} on {device}"
    # Heads multiply the rows that the last tile may reach past the end.
    most = MAX_ROWS // 2 if of_heads or group_size is not None else MAX_ROWS
    # Not while compiling: it would bound a dynamic batch, and the operator asks again at run time.
    if not _is_compiling() and x.numel() // columns > most:
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
        RuntimeError: ``use_backend("triton")`` is in force and the kernels cannot serve the call.
    """
    if chosen.backend == "reference":
        return "reference"
    if chosen.backend == "auto" and (_is_exported() or (settings.while_compiling == "formula" and _is_compiling())):
        return "original"
    reason = refusal(x, weight, bias, spec, gate)
    if reason is None:
        return "triton"
    if chosen.backend == "triton":
        raise RuntimeError(f"use_backend('triton'): {reason}")
    return "original"


def qk_fits(q, k, parameters, spec: NormSpec, cos, sin) -> bool:
    """Whether one launch can norm and rotate q and k: their types, shapes, dtypes and strides, and the formula.

    parameters: the weights of q and k, then their biases, or None for each.
    """
    q_weight, k_weight, q_bias, k_bias = parameters
    if unserved(spec, "queries and keys") is not None or (spec.has_bias and not (spec.has_weight and cos is None)):
        return False
    if any((p is None) == has for p, has in zip(parameters, [spec.has_weight] * 2 + [spec.has_bias] * 2, strict=True)):
        return False
    if (cos is None) != (sin is None):
        return False
    device, mixed = q.device, False
    for pair in ((q, k), parameters, (cos, sin)):
        for t in pair:
            if t is not None:
                if type(t) not in DIRECT_TYPES and not isinstance(t, FakeTensor) and not is_dtensor(t):
                    return False
                if t.dtype != pair[0].dtype or t.device != device:
                    return False
                mixed = mixed or t.dtype != q.dtype
                if mixed and t.dtype not in KERNEL_DTYPES:  # `resolve_backend` asks the same of q
                    return False
    if mixed and spec.rounding == "weight_dtype":
        return False
    if q.dim() != 4 or k.dim() != 4:
        return False
    batch, _, length, head_dim = q.shape
    k_batch, _, k_length, k_dim = k.shape
    if k_batch != batch or k_length != length or k_dim != head_dim or not 1 <= head_dim <= MAX_HEAD_DIM:
        return False
    if q.stride(3) != 1 or k.stride(3) != 1:
        return False
    if q_weight is not None and not _qk_parameters_fit(q, k, parameters, spec):
        return False
    if cos is not None:
        if cos.dim() != 3 or cos.shape != sin.shape or cos.stride() != sin.stride() or cos.stride(2) != 1:
            return False
        tables, positions, columns = cos.shape
        if positions != length or (tables != 1 and tables != batch) or columns > head_dim or columns % 2 or not columns:
            return False
    # Not while compiling: it would bound a dynamic batch, and the operator asks again at run time.
    return _is_compiling() or q.numel() + k.numel() <= MAX_ROWS * head_dim


def _qk_parameters_fit(q, k, parameters, spec: NormSpec) -> bool:
    """Of all heads, (head_dim,); of each, (heads, head_dim); or of one norm over all of them, (heads * head_dim,)."""
    if not all(p is None or p.is_contiguous() for p in parameters):
        return False
    found = [tuple(p.shape) for p in parameters if p is not None]
    (_, q_heads, _, head_dim), k_heads = q.shape, k.shape[1]
    sizes = len(found) // 2
    if found == [(head_dim,)] * 2 * sizes or found == [(q_heads, head_dim), (k_heads, head_dim)] * sizes:
        return True
    spans = found == [(q_heads * head_dim,), (k_heads * head_dim,)] * sizes
    return spans and not spec.centered and next_power_of_2(q_heads) * next_power_of_2(head_dim) <= MAX_TOKEN

"""Which backend computes a call: the Triton kernels, the formula in plain torch, or the
module's own forward.

`runs_on` answers that of a device, `why_not` and `serves_qk` of a call.
"""

import os
import threading
import warnings
from collections.abc import Iterable
from functools import cache, partial
from importlib.util import find_spec

import torch
from torch import Tensor
from torch._C import _current_graph_task_id, _is_tracing
from torch.compiler import assume_constant_result, is_compiling, is_exporting

from ..formula import HALVES, TORCH_RELEASE, NormSpec, Rotation, promoted
from ..kernels.failure import KernelUnavailable, failed
from ..kernels.serves import unserved
from ..kernels.sizes import MAX_HEAD_DIM, MAX_HIDDEN_SIZE
from .direct import autocast_enabled, present
from .launches import forget_launches
from .settings import chosen, insists, settings

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Row numbers are 32-bit, and heads multiply the rows that the last tile may reach past
# the last row.
MAX_ROWS = 2**30 - 2**15
MAX_HEADS = 2**16 - 1  # the second dimension of a CUDA grid

DIRECT = "direct"  # how kernels are started
_lists_rms_norm = TORCH_RELEASE >= (2, 12)
# devices whose kernels cannot be loaded, (type, index), and why
_left: dict[tuple, str] = {}
_failing = threading.Lock()


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
    return _left.get((device_type, index)) or _device_refusal(device_type, index)


def give_up(error: KernelUnavailable, device: torch.device) -> None:
    """Leave a device to plain torch from now on, as its kernels cannot be loaded; a
    warning says so once.

    Within a backward, forwards are left when it ends: a checkpoint runs some of them
    again, as they were.

    Raises:
        KernelUnavailable: the error, where `use_backend("triton")` insists on the
            kernels.
    """
    if insists():
        raise error
    with _failing:
        first = device not in failed
        failed.setdefault(device, str(error))
    if _current_graph_task_id() == -1:
        _leave(device)
    else:
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(partial(_leave, device))
    if first:
        warnings.warn(
            f"hf_rmsnorm: {error}\nOn {device} patched modules run their own forward from now on; "
            "after the cure, start Python again.",
            stacklevel=2,
        )


def _leave(device: torch.device) -> None:
    lines = failed[device].splitlines()
    _left[device.type, device.index] = "; ".join(lines)
    forget_launches()


def left_alone(x: Tensor) -> bool:
    """Whether the default backend leaves x's device to plain torch. Each forward on a CPU
    asks this first.
    """
    if chosen.backend != "auto" or type(x) is not Tensor:
        return False
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
        launches = launch_path(device)
        if launches != DIRECT:
            reason += f", launched {launches}"
    return {"device": str(device), "backend": backend, "reason": reason}


def launch_path(device: torch.device | None = None) -> str:
    """How kernels are started on a device that they run on, in words: `DIRECT`, or
    through Triton's dispatch and why. Without a device: what the version alone tells.
    """
    if find_spec("triton") is None:
        return "none, as triton is not installed"
    from ..kernels import launchers

    version = launchers.VERSION
    if interprets():
        return "by Triton's interpreter"
    if launchers.KNOWN:
        return DIRECT
    if device is None:
        return (
            f"tried on the first GPU, as Triton {version} is newer than this hf-rmsnorm"
        )
    try:
        reason = launchers.slow_because(device)
    except Exception:
        # no kernel compiles or runs there, as the first launch will say
        return DIRECT
    if not reason:
        return DIRECT
    return (
        "through Triton's dispatch, about three times the host time: "
        f"upgrade hf-rmsnorm, which does not know Triton {version} ({reason})"
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


def _is_exported() -> bool:
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


def why_not(spec: NormSpec, x, weight, bias, gate=None, residual=None) -> str | None:
    """Why the kernels do not serve the norm of x, or of ``residual + x``, or None where
    they do.
    """
    if x.is_nested:
        return "x is a nested tensor"
    return (
        _why_not_formula(spec, x, gate, residual)
        or _why_not_operands(x, weight, bias, gate, residual)
        or _why_not_rows(spec, x, weight, bias, residual)
        or device_refusal(x.device.type, x.device.index)
    )


def _why_not_formula(spec: NormSpec, x, gate, residual) -> str | None:
    columns = x.shape[-1] if x.dim() else 0
    if not 1 <= columns <= MAX_HIDDEN_SIZE:
        return f"the last dimension of x, shape {tuple(x.shape)}, is not between 1 and {MAX_HIDDEN_SIZE}"
    families = ["rows"]
    if residual is not None:
        families.append("residual sum")
    elif spec.group_size is not None:
        if columns % spec.group_size:
            return f"groups of {spec.group_size} do not divide rows of {columns}"
        spec = spec.ungrouped
    missing = unserved(spec, *families)
    if missing is not None:
        return f"{missing}, which the kernels do not compute"
    if (gate is None) != (spec.gate is None):
        return "its formula has a gate and the call has none, or the other way round"
    return None


def _why_not_operands(x, weight, bias, gate, residual) -> str | None:
    parameters = {"weight": weight, "bias": bias}
    operands = {"x": x, **parameters, "gate": gate, "residual": residual}
    for name, t in operands.items():
        if t is None:
            continue
        if t.dtype not in KERNEL_DTYPES:
            return (
                f"{name} is {t.dtype}; the kernels serve float32, float16 and bfloat16"
            )
        if t.device != x.device:
            return f"{name} is on {t.device} and x on {x.device}: move one of them"
        expected = x.shape
        if name in parameters:  # in columns, or in rows of heads
            expected = x.shape[-min(t.dim(), 2) :]
        if t.shape != expected:
            return f"{name} has shape {tuple(t.shape)}, and x {tuple(x.shape)}"
    if residual is None:
        return None
    dtypes = x.dtype, residual.dtype
    if promoted(*dtypes) not in dtypes:
        return f"the sum of {x.dtype} and {residual.dtype} is neither"
    return None


def _why_not_rows(spec: NormSpec, x, weight, bias, residual) -> str | None:
    """Why not so many rows, or not with a row of parameters for each head."""
    dimensions = {p.dim() for p in present(weight, bias)}
    if len(dimensions) > 1:
        return "weight and bias differ in shape"
    if dimensions == {2}:
        if residual is not None:
            return "a parameter of heads is not read behind a sum"
        heads = x.shape[-2]
        if not 0 < heads <= MAX_HEADS or spec.group_size is not None:
            return f"parameters of {heads} heads"
    if is_compiling():
        # it would bound a dynamic batch, and the operator asks again at run time
        return None
    columns = spec.group_size or x.shape[-1]
    rows = x.numel() // columns
    if not 0 < rows <= MAX_ROWS:
        return f"x has {rows} rows, not 1 to {MAX_ROWS}"
    return None


def resolve_backend(x, weight, bias, spec: NormSpec, gate=None) -> str:
    """``"triton"``, ``"reference"``, or ``"original"`` where ``auto`` leaves the call
    to the layer's own forward.

    Raises:
        RuntimeError: ``use_backend("triton")`` is in force and the kernels cannot serve
            the call.
    """
    if chosen.backend == "reference":
        return "reference"
    insisted = chosen.backend == "triton"
    if not insisted and (compiles_original() or _is_exported()):
        return "original"
    reason = why_not(spec, x, weight, bias, gate)
    if reason is None:
        return "triton"
    if not insisted:
        return "original"
    if not x.numel():
        return "reference"  # no rows are no launch
    raise RuntimeError(f"use_backend('triton'): {reason}")


def autocasts_functional(spec: NormSpec, device_type: str) -> bool:
    """Whether F.layer_norm, or F.rms_norm, computes in float32: is it on an
    accelerator's autocast list for that?
    """
    return (
        device_type != "cpu"
        and autocast_enabled(device_type)
        and (spec.centered or _lists_rms_norm)
    )


def serves_qk(spec: NormSpec, q, k, q_weight, k_weight, cos, sin) -> bool:
    """Whether one launch norms and rotates q and k."""
    weights = present(q_weight, k_weight)
    if unserved(spec, "queries and keys") is not None:
        return False
    if why_not_rotated(q, k, cos, sin) is not None:
        return False
    return _are_weights(spec, q, weights)


def why_not_rotated(q, k, cos, sin, way: Rotation = HALVES) -> str | None:
    """Why no launch rotates q and k by these tables, or None where one does."""
    tensors = q, k, cos, sin
    dtypes = [t.dtype for t in tensors]
    if dtypes[0] != dtypes[1] or dtypes[2] != dtypes[3]:
        return f"q, k, cos and sin are {dtypes}"
    for t in tensors:
        if t.device != q.device or t.dtype not in KERNEL_DTYPES:
            return f"one of q, k, cos and sin is {t.dtype} on {t.device}"
    shapes = [tuple(t.shape) for t in tensors]
    if way.transposed and q.dim() == k.dim() == 4:
        q = q.transpose(1, 2)
        k = k.transpose(1, 2)
    if not (_are_heads(q, k) and _are_tables(q, cos, sin, way)):
        return f"no kernel serves q, k, cos and sin in these layouts, {shapes}"
    return device_refusal(q.device.type, q.device.index)


def _are_weights(spec: NormSpec, q, weights: list) -> bool:
    if len(weights) != 2 * spec.has_weight:
        return False
    for weight in weights:
        if weight.device != q.device or weight.dtype not in KERNEL_DTYPES:
            return False
        if weight.shape != q.shape[3:]:
            return False
        if not weight.is_contiguous():
            return False
        if weight.dtype != weights[0].dtype:
            return False
    return True


def _are_heads(q, k) -> bool:
    """Whether q and k are (batch, heads, length, head_dim) in rows of unit stride."""
    if q.dim() != 4 or k.dim() != 4:
        return False
    if q.stride(3) != 1 or k.stride(3) != 1:
        return False
    batch, heads, length, head_dim = q.shape
    k_heads = k.shape[1]
    if k.shape != (batch, k_heads, length, head_dim):
        return False
    rows = batch * (heads + k_heads) * length
    return head_dim <= MAX_HEAD_DIM and 0 < rows <= MAX_ROWS


def _are_tables(q, cos, sin, way: Rotation) -> bool:
    """Whether cos and sin are (batch or 1, length, columns) in one layout."""
    if cos.shape != sin.shape:
        return False
    if cos.stride() != sin.stride():
        return False
    if cos.dim() != 3 or cos.stride(2) != 1:
        return False
    batch, _, length, head_dim = q.shape
    tables, positions, columns = cos.shape
    columns = way.columns(columns)
    if way.tables == "half" and columns != head_dim:
        return False
    if positions != length or tables not in (1, batch):
        return False
    return columns % 2 == 0 and 2 <= columns <= head_dim

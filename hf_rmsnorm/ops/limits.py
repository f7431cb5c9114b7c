"""Which tensors the kernels serve, and why not others.

A norm may also save its output for the backward, in place of its input: the next linear
layer saves it anyway. ``xhat = (y - bias) / (weight_offset + weight)`` then replaces
the normalised input, with the rounding of y. So no scale may be so small that y has
lost xhat, and no bias so large that y is mostly bias. That is decided once, when a
model is patched. A scale that becomes zero later counts as one in the backward, where
its xhat is zero.
"""

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..formula import HALVES, NormSpec, Rotation, promoted
from ..kernels.serves import unserved
from ..kernels.sizes import MAX_HEAD_DIM, MAX_HIDDEN_SIZE
from ..operands import NormOperands, Operands, present
from .backend import device_refusal
from .launches import TENSOR_TYPES

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Row numbers are 32-bit, and heads multiply the rows that the last tile may reach past
# the last row.
MAX_ROWS = 2**30 - 2**15
MAX_HEADS = 2**16 - 1  # the second dimension of a CUDA grid
LEAST_SCALE = 1e-3  # of the largest
SMALLEST_SCALE = 2.0**-14  # below it float16 keeps fewer bits of y than of xhat
# in fewer, dx may be the small difference of two numbers of which y gives one
LEAST_COLUMNS = 32
# times the scale: as large as the largest elements of a row, whose rounding there is in
# any case
MOST_BIAS = 4.0
# in more, the sums of dweight and dbias do not fit into registers
MOST_COLUMNS_WITH_BIAS = 8_192


def why_not(spec: NormSpec, operands: Operands) -> str:
    """Why the kernels do not compute a norm of these `NormOperands`; "" where they do."""
    operands = NormOperands(*operands)
    x = operands.x
    if x.is_nested:
        return "x is a nested tensor"
    return (
        _why_not_formula(spec, operands)
        or _why_not_operands(operands)
        or _why_not_rows(operands)
        or device_refusal(x.device.type, x.device.index)
        or _why_not_modulated(operands)
        or ""
    )


def _why_not_formula(spec: NormSpec, operands: NormOperands) -> str | None:
    x = operands.x
    columns = x.shape[-1] if x.dim() else 0
    if not 1 <= columns <= MAX_HIDDEN_SIZE:
        return f"the last dimension of x, shape {tuple(x.shape)}, is not between 1 and {MAX_HIDDEN_SIZE}"
    families = ["rows"]
    if operands.residual is not None:
        families.append("residual sum")
    missing = unserved(spec, *families)
    if missing is not None:
        return f"{missing}, which the kernels do not compute"
    if (operands.gate is None) != (spec.gate is None):
        return "its formula has a gate and the call has none, or the other way round"
    return None


def _why_not_operands(operands: NormOperands) -> str | None:
    x, weight, bias, *_, residual = operands
    for name, t in zip(NormOperands._fields, operands, strict=True):
        if t is None:
            continue
        if t.dtype not in KERNEL_DTYPES:
            return (
                f"{name} is {t.dtype}; the kernels serve float32, float16 and bfloat16"
            )
        if t.device != x.device:
            return f"{name} is on {t.device} and x on {x.device}: move one of them"
        is_parameter = name in ("weight", "bias")
        # of columns, or of rows of heads
        expected = x.shape[-min(t.dim(), 2) :] if is_parameter else x.shape
        if t.shape != expected:
            return f"{name} has shape {tuple(t.shape)}, and x {tuple(x.shape)}"
    if residual is None:
        return None
    dtypes = x.dtype, residual.dtype
    if promoted(*dtypes) not in dtypes:
        return f"the sum of {x.dtype} and {residual.dtype} is neither"
    return None


def _why_not_rows(operands: NormOperands) -> str | None:
    """Why not so many rows, or not with a row of parameters for each head."""
    x, weight, bias, *_, residual = operands
    dimensions = {p.dim() for p in present(weight, bias)}
    if len(dimensions) > 1:
        return "weight and bias differ in shape"
    if dimensions == {2}:
        if residual is not None:
            return "a parameter of heads is not read behind a sum"
        heads = x.shape[-2]
        if not 0 < heads <= MAX_HEADS:
            return f"parameters of {heads} heads"
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and not t.is_contiguous():
            return f"{name} has gaps"
    if is_compiling():
        # it would bound a dynamic batch, and the operator asks again at run time
        return None
    rows = x.numel() // x.shape[-1]
    if not 0 < rows <= MAX_ROWS:
        return f"x has {rows} rows, not 1 to {MAX_ROWS}"
    return None


def _why_not_modulated(operands: NormOperands) -> str | None:
    x, weight, bias, gate, scale, shift, multiplier, residual = operands
    if scale is None:
        return None
    dtypes = {t.dtype for t in present(*operands)} - {x.dtype}
    if dtypes:
        return f"x is {x.dtype}, and what is computed with it {dtypes.pop()}"
    if weight is not None and weight.dim() != 1:
        return "its weight is one of heads"
    if residual is not None and not (x.is_contiguous() and residual.is_contiguous()):
        return "a summand has gaps"
    strides = {t.stride() for t in present(scale, shift, multiplier)}
    if len(strides) > 1 or scale.stride(-1) != 1:
        return "scale, shift and gate lie differently in memory, or have gaps"
    return None


def shapes_fit(x, weight, bias, gate) -> bool:
    """Whether the plain formula, which would broadcast anything, may compute a norm of
    x; the kernels check for themselves.
    """
    if not x.is_floating_point() or not x.dim():
        return False
    if gate is not None and gate.shape != x.shape:
        return False
    parameters = present(weight, bias)
    are_rows = all(p.shape == x.shape[-1:] for p in parameters)
    return are_rows or all(p.shape == x.shape[-2:] for p in parameters)


def serves_qk(
    spec: NormSpec | None, operands: Operands, way: Rotation = HALVES
) -> bool:
    """Whether one launch rotates the q and k of these `HeadOperands`, once it has
    computed their norms if there are any.
    """
    q, k, q_weight, k_weight, *tables = operands
    if why_not_rotated(q, k, *tables, way):
        return False
    if spec is None:
        return True
    weights = present(q_weight, k_weight)
    if unserved(spec, "queries and keys") or len(weights) != 2 * spec.has_weight:
        return False
    for t in weights:
        layout = t.dtype, t.device, t.shape, t.is_contiguous()
        if layout != (weights[0].dtype, q.device, q.shape[3:], True):
            return False
    return all(t.dtype in KERNEL_DTYPES for t in weights)


def why_not_rotated(q, k, cos, sin, way: Rotation = HALVES) -> str:
    """Why no launch rotates q and k by these tables; "" where one does."""
    tensors = q, k, cos, sin
    dtypes = [t.dtype for t in tensors]
    if dtypes[0] != dtypes[1] or dtypes[2] != dtypes[3]:
        return f"q, k, cos and sin are {dtypes}"
    for t in tensors:
        if t.device != q.device or t.dtype not in KERNEL_DTYPES:
            return f"one of q, k, cos and sin is {t.dtype} on {t.device}"
    if not (_are_heads(q, k) and _are_tables(q, cos, sin, way)):
        shapes = [tuple(t.shape) for t in tensors]
        return f"no kernel serves q, k, cos and sin in these layouts, {shapes}"
    return device_refusal(q.device.type, q.device.index) or ""


def _are_heads(q, k) -> bool:
    """Whether q and k are (batch, heads, length, head_dim) in rows of unit stride."""
    if q.dim() != 4 or k.dim() != 4 or not q.stride(3) == k.stride(3) == 1:
        return False
    batch, heads, length, head_dim = q.shape
    rows = batch * (heads + k.shape[1]) * length
    return (
        k.shape == (batch, k.shape[1], length, head_dim)
        and head_dim <= MAX_HEAD_DIM
        and 0 < rows <= MAX_ROWS
    )


def _are_tables(q, cos, sin, way: Rotation) -> bool:
    """Whether cos and sin are (batch or 1, length, columns) in one layout."""
    layouts = [(t.shape, t.stride()) for t in (cos, sin)]
    if layouts[0] != layouts[1] or cos.dim() != 3 or cos.stride(2) != 1:
        return False
    batch, _, length, head_dim = q.shape
    tables, positions, columns = cos.shape
    columns = way.columns(columns)
    if way.tables == "half" and columns != head_dim:
        return False
    if positions != length or tables not in (1, batch):
        return False
    return columns % 2 == 0 and 2 <= columns <= head_dim


def input_needed(weight: Tensor | None, bias: Tensor | None, spec: NormSpec) -> str:
    """Return why a norm with these parameters keeps its input; "" where its output
    serves. Synchronises with a GPU.
    """
    refusal = unserved(spec, "from the output")
    if refusal is not None:
        return refusal
    if weight is None:
        if bias is None:
            return ""
        return "it has a bias alone"
    if bias is not None and bias.shape[-1] > MOST_COLUMNS_WITH_BIAS:
        return f"it has a bias and more than {MOST_COLUMNS_WITH_BIAS:,} columns"
    for t in present(weight, bias):
        if not _has_values(t):
            return ""
    scale = (weight.detach().float() + spec.weight_offset).abs()
    least = scale.min().item()
    largest = scale.max().item()
    if not least >= max(LEAST_SCALE * largest, SMALLEST_SCALE):
        # so too where one is NaN
        return f"a weight is below {LEAST_SCALE:g} of the largest"
    if bias is None:
        return ""
    is_small = bias.detach().float().abs() <= MOST_BIAS * scale
    if not is_small.all():
        return f"a bias is above {MOST_BIAS:g} times its weight"
    return ""


def _has_values(t: Tensor) -> bool:
    """Whether a parameter's values can be read here: it is no shard, not on meta, and
    DeepSpeed has not taken it.
    """
    return type(t) in TENSOR_TYPES and not t.is_meta and t.numel() > 0


def serves_as_input(y: Tensor, x: Tensor, spec: NormSpec) -> bool:
    """Whether the backward can read y in the place of x: the same dtype, rows in the
    same order, and no short ones.
    """
    if y.dtype != x.dtype:
        return False
    if y.shape[-1] < LEAST_COLUMNS:
        return False
    return spec.functional or y.stride() == x.stride()

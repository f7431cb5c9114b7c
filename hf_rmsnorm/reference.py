"""Every formula of `NormSpec` in plain torch: the oracle of the tests and the fallback
where no kernel runs.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .formula import HALVES, NormSpec, OptionalTensor, Rotation, compute_dtype, dtype_of


def reference_norm(
    x: Tensor,
    weight: OptionalTensor,
    bias: OptionalTensor,
    spec: NormSpec,
    gate: OptionalTensor = None,
) -> Tensor:
    """Normalise x over its last dimension exactly as the layer that `spec` describes
    does.

    The operators and their order are those of the Hugging Face classes, so that the
    result is bit-equal to theirs on the same device. float64 stays float64 throughout,
    which is what gradient checks and the noise floor need.

    Args:
        x: (..., hidden_size), any floating dtype.
        weight, bias: (hidden_size,) or None; or (heads, hidden_size) where x is (...,
            heads, hidden_size).
        gate: x's shape, where the spec has one.

    Returns:
        (..., hidden_size) in ``spec.output_dtype(x.dtype, weight.dtype)``.
    """
    if spec.group_size is not None:
        x, weight, bias, gate = in_groups(spec.group_size, x, weight, bias, gate)
        y = reference_norm(x, weight, bias, spec.ungrouped, gate)
        return y.flatten(-2)
    in_one_operator = spec.centered or bias is None or spec.rounding != "once"
    if spec.functional and in_one_operator:
        return _functional_norm(x, weight, bias, spec)
    weight_dtype = dtype_of(weight)
    compute = compute_dtype(x.dtype)
    h, square, _ = _normalised(x, spec, gate, compute)
    h = _over_root(h, square, spec, x.dtype)
    h = h.to(spec.hat_dtype(x.dtype, weight_dtype))
    if weight is not None:
        h = _scale(weight, spec) * h
    if bias is not None:
        h = h + bias
    if spec.gated_after:
        z = gate.to(compute)
        activation = F.silu
        if spec.gate == "sigmoid_after":
            activation = torch.sigmoid
        h = h * activation(z)
    return h.to(spec.output_dtype(x.dtype, weight_dtype))


def _functional_norm(x, weight, bias, spec: NormSpec) -> Tensor:
    """By `F.layer_norm` or `F.rms_norm`; the weight is applied behind it where xhat is
    rounded first.
    """
    if spec.weight_offset:
        weight = weight + spec.weight_offset
    shape = x.shape[-1:]
    rounds_once = spec.rounding == "once"
    inner_weight = inner_bias = None
    if rounds_once:
        inner_weight = weight
        inner_bias = bias
    if spec.centered:
        y = F.layer_norm(x, shape, inner_weight, inner_bias, spec.eps)
    else:
        y = F.rms_norm(x, shape, inner_weight, spec.eps)
    if rounds_once:
        return y
    y = weight * y
    if bias is None:
        return y
    return y + bias


def _over_root(h, square, spec: NormSpec, x_dtype: torch.dtype) -> Tensor:
    """h over the root of its mean square."""
    if spec.eps_outside:
        root = torch.sqrt(square) + spec.eps
        return h / root
    rstd = _rstd(square, spec)
    if spec.rounding == "rstd":
        return h.to(x_dtype) * rstd.to(x_dtype)
    return h * rstd


def _normalised(x, spec: NormSpec, gate, compute: torch.dtype):
    """(x as it is divided by its root, its mean square, the mean that was subtracted or
    None), in dtype `compute`.
    """
    h = x.to(compute)
    if spec.gate == "silu_before":
        h = h * F.silu(gate.to(compute))
    mean = None
    if spec.centered:
        mean = h.mean(-1, keepdim=True)
        h = h - mean
    square = h.pow(2).mean(-1, keepdim=True)
    return h, square, mean


def _scale(weight, spec: NormSpec) -> Tensor:
    if not spec.weight_offset:
        return weight
    compute = compute_dtype(weight.dtype)
    scale = weight.to(compute) + spec.weight_offset
    if spec.rounds_offset:
        return scale.to(weight.dtype)
    return scale


def in_groups(group_size: int, *tensors: OptionalTensor) -> list[OptionalTensor]:
    """Each (..., hidden_size) as a view of (..., hidden_size / group_size, group_size)."""
    grouped = []
    for t in tensors:
        if t is not None:
            t = t.unflatten(-1, (-1, group_size))
        grouped.append(t)
    return grouped


def reference_stats(
    x: Tensor, spec: NormSpec, gate: OptionalTensor = None
) -> tuple[Tensor, OptionalTensor]:
    """(rstd, mean) of each row of x in float32, flattened to (rows,); mean is None for
    RMSNorm.
    """
    compute = compute_dtype(x.dtype)
    _, square, mean = _normalised(x, spec, gate, compute)
    if mean is not None:
        mean = mean.flatten().float()
    rstd = _rstd(square, spec)
    return rstd.flatten().float(), mean


def _rstd(square, spec: NormSpec) -> Tensor:
    if spec.eps_outside:
        root = square.sqrt() + spec.eps
        return 1.0 / root
    return torch.rsqrt(square + spec.eps)


def reference_backward(
    dy: Tensor,
    x: Tensor,
    weight: OptionalTensor,
    bias: OptionalTensor,
    spec: NormSpec,
    need: Sequence[bool],
    gate: OptionalTensor = None,
) -> tuple[OptionalTensor, ...]:
    """The closed-form gradients (dx, dweight, dbias, dgate), None where `need` is
    False.

    With g = dy * (weight_offset + weight): dx = rstd * (g - xhat * mean(g * xhat)),
    less rstd * mean(g) where the norm is centered; dweight = sum(dy * xhat); dbias =
    sum(dy). An eps outside the root multiplies mean(g * xhat) by (RMS + eps) / RMS. A
    gate after the norm multiplies dy first; one before it, what dx becomes. Computed in
    float32, or float64 for float64 inputs.
    """
    need_x, need_weight, need_bias, need_gate = (*need, False)[:4]
    compute = compute_dtype(x.dtype)
    h, square, _ = _normalised(x, spec, gate, compute)
    rstd = _rstd(square, spec)
    xhat = h * rstd
    g = dy.to(compute)
    scale = 1.0
    if weight is not None:
        scale = _scale(weight, spec).to(compute)
    hat_dtype = spec.hat_dtype(x.dtype, dtype_of(weight))
    rounded = xhat.to(hat_dtype).to(compute)
    dx = dweight = dbias = dgate = None
    if gate is not None:
        factor, slope = _gate_and_slope(gate.to(compute), spec)
    if spec.gated_after:
        y = rounded * scale
        if bias is not None:
            y = y + bias.to(compute)
        dgate = g * y * slope
        g = g * factor
    if need_weight:
        dweight = (g * rounded).sum_to_size(weight.shape)
        dweight = dweight.to(weight.dtype)
    if need_bias:
        dbias = g.sum_to_size(bias.shape)
        dbias = dbias.to(bias.dtype)
    if need_x or need_gate:
        dx = _input_gradient(g * scale, xhat, square, rstd, spec)
        if spec.gate == "silu_before":
            dgate = dx * x.to(compute) * slope
            dx = dx * factor
    dx = dx.to(x.dtype) if need_x else None
    dgate = dgate.to(gate.dtype) if need_gate else None
    return dx, dweight, dbias, dgate


def _gate_and_slope(z, spec: NormSpec):
    """(the gate's factor, its derivative) at z."""
    sigmoid = torch.sigmoid(z)
    rest = 1 - sigmoid
    if spec.gate == "sigmoid_after":
        return sigmoid, sigmoid * rest
    slope = sigmoid * (1 + z * rest)
    return z * sigmoid, slope


def _input_gradient(g, xhat, square, rstd, spec: NormSpec) -> Tensor:
    """The gradient of the normalised input, from that of xhat."""
    along = (g * xhat).mean(-1, keepdim=True)
    if spec.eps_outside:
        rms = square.sqrt()
        factor = (rms + spec.eps) / rms
        along = along * factor
    dx = g - xhat * along
    if spec.centered:
        mean = g.mean(-1, keepdim=True)
        dx = dx - mean
    return dx * rstd


def input_of_output(
    y: Tensor,
    weight: OptionalTensor,
    bias: OptionalTensor,
    rstd: Tensor,
    spec: NormSpec,
) -> Tensor:
    """The x (less its mean, where the norm is centered) that gave y and rstd, in
    float32 and with the rounding of y.

    A scale of zero counts as one, as in the kernel.
    """
    xhat = y.to(compute_dtype(y.dtype))
    if bias is not None:
        xhat = xhat - bias.to(xhat.dtype)
    if weight is not None:
        scale = _scale(weight, spec).to(xhat.dtype)
        xhat = xhat / torch.where(scale == 0, 1.0, scale)
    rows = y.shape[:-1]
    return xhat / rstd.view(*rows, 1)


def gradients_of_output(
    dy: Tensor,
    y: Tensor,
    weight: OptionalTensor,
    bias: OptionalTensor,
    rstd: Tensor,
    spec: NormSpec,
    need: Sequence[bool],
) -> tuple[OptionalTensor, ...]:
    """`reference_backward` of a norm without a gate, from its result and the rstd of
    each row, in float32 or float64; five results, of which the last two are None.
    """
    need_x, need_weight, need_bias, *_ = need
    x = input_of_output(y, weight, bias, rstd, spec)
    rstd = rstd.view(*y.shape[:-1], 1).to(x.dtype)
    xhat = x * rstd
    g = dy.to(x.dtype)
    dx = dweight = dbias = None
    if need_weight:
        dweight = (g * xhat).sum_to_size(weight.shape)
    if need_bias:
        dbias = g.sum_to_size(bias.shape)
    if need_x:
        if weight is not None:
            g = g * _scale(weight, spec).to(x.dtype)
        dx = _input_gradient(g, xhat, None, rstd, spec)
    return dx, dweight, dbias, None, None


def reference_qk_norm(
    q, k, q_weight, k_weight, spec: NormSpec | None, cos, sin, way: Rotation = HALVES
) -> tuple[Tensor, Tensor]:
    """(q', k'): the heads of q and of k, normalised and then rotated, in the operators
    of Hugging Face's attentions; rotated alone, if the spec is None.

    Args:
        q, k: (batch, heads, length, head_dim); k may have fewer heads.
        q_weight, k_weight: (head_dim,), or None where the spec has no weight.
        cos, sin, way: as in `rotated`.
    """
    if spec is not None:
        q = reference_norm(q, q_weight, None, spec)
        k = reference_norm(k, k_weight, None, spec)
    return rotated(q, cos, sin, way), rotated(k, cos, sin, way)


def rotated(y: Tensor, cos: Tensor, sin: Tensor, way: Rotation = HALVES) -> Tensor:
    """`apply_rotary_pos_emb` (Su et al. 2021) on one tensor.

    Args:
        y: (batch, heads, length, head_dim).
        cos, sin: (batch or 1, length, columns); the columns of y behind those that they
            turn pass.
    """
    columns = way.columns(cos.shape[-1])
    if columns != y.shape[-1]:
        turned = rotated(y[..., :columns], cos, sin, way)
        passing = y[..., columns:]
        return torch.cat((turned, passing), dim=-1)
    cos = _of_all_columns(cos, way).unsqueeze(1)
    sin = _of_all_columns(sin, way).unsqueeze(1)
    dtype = compute_dtype(y.dtype) if way.once else y.dtype
    x = y if way.casts_twice else y.to(dtype)
    left, right = _sides(x, way.reads_pairs)
    other = _together(-right, left, way.reads_pairs)
    turned = x.to(dtype) * cos + other.to(dtype) * sin
    if way.writes_pairs != way.reads_pairs:
        turned = _together(*_sides(turned, way.reads_pairs), way.writes_pairs)
    return turned.to(y.dtype) if way.once else turned


def _of_all_columns(table: Tensor, way: Rotation) -> Tensor:
    """A table with a column for each that turns."""
    if way.tables == "all":
        return table
    if way.tables == "first":
        table, _ = table.chunk(2, dim=-1)
    return _together(table, table, way.reads_pairs)


def _sides(x: Tensor, pairs: bool) -> tuple[Tensor, Tensor]:
    """The two columns of each pair that turns."""
    if pairs:
        return x[..., ::2], x[..., 1::2]
    return x.chunk(2, dim=-1)


def _together(left: Tensor, right: Tensor, pairs: bool) -> Tensor:
    """The inverse of `_sides`."""
    if pairs:
        return torch.stack((left, right), dim=-1).flatten(-2)
    return torch.cat((left, right), dim=-1)

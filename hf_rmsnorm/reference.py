"""Every formula of `NormSpec` in plain torch: the oracle of the tests and the fallback where no kernel runs."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .formula import NormSpec, compute_dtype


def reference_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, spec: NormSpec
) -> torch.Tensor:
    """Normalise x over its last dimension exactly as the layer that `spec` describes does.

    The operators and their order are those of the Hugging Face classes, so that the result is bit-equal to theirs on
    the same device. float64 stays float64 throughout, which is what gradient checks and the noise floor need.

    Args:
        x: (..., hidden_size), any floating dtype.
        weight: (hidden_size,) or None.
        bias: (hidden_size,) or None.

    Returns:
        (..., hidden_size) in ``spec.output_dtype(x.dtype, weight.dtype)``.
    """
    if spec.functional:
        if spec.weight_offset and weight is not None:
            weight = weight + spec.weight_offset
        if spec.centered:
            return F.layer_norm(x, x.shape[-1:], weight, bias, spec.eps)
        y = F.rms_norm(x, x.shape[-1:], weight, spec.eps)
        return y if bias is None else y + bias
    weight_dtype = None if weight is None else weight.dtype
    compute = compute_dtype(x.dtype)
    h = x.to(compute)
    if spec.centered:
        h = h - h.mean(-1, keepdim=True)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + spec.eps)
    h = h.to(spec.hat_dtype(x.dtype, weight_dtype))
    if weight is not None:
        if spec.weight_offset:
            weight = weight.to(compute_dtype(weight.dtype)) + spec.weight_offset
            if spec.rounding != "once":
                weight = weight.to(weight_dtype)
        h = weight * h
    if bias is not None:
        h = h + bias
    return h.to(spec.output_dtype(x.dtype, weight_dtype))


def reference_stats(x: torch.Tensor, spec: NormSpec) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(rstd, mean) of each row of x in float32, flattened to (rows,); mean is None for RMSNorm."""
    h = x.to(compute_dtype(x.dtype))
    mean = h.mean(-1, keepdim=True) if spec.centered else None
    if mean is not None:
        h = h - mean
    rstd = torch.rsqrt(h.pow(2).mean(-1) + spec.eps).flatten().float()
    return rstd, None if mean is None else mean.flatten().float()


def reference_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    spec: NormSpec,
    need: tuple[bool, bool, bool] | list[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """The closed-form gradients (dx, dweight, dbias), None where `need` is False.

    With g = dy * (weight_offset + weight): dx = rstd * (g - xhat * mean(g * xhat)), less rstd * mean(g) where the norm
    is centered; dweight = sum(dy * xhat); dbias = sum(dy). Computed in float32, or float64 for float64 inputs.
    """
    compute = compute_dtype(x.dtype)
    h = x.to(compute)
    if spec.centered:
        h = h - h.mean(-1, keepdim=True)
    rstd = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + spec.eps)
    xhat = h * rstd
    g = dy.to(compute)
    dx = dweight = dbias = None
    if need[1]:
        rounded = xhat.to(spec.hat_dtype(x.dtype, weight.dtype)).to(compute)
        dweight = _sum_rows(g * rounded).to(weight.dtype)
    if need[2]:
        dbias = _sum_rows(g).to(bias.dtype)
    if need[0]:
        if weight is not None:
            g = g * (weight.to(compute) + spec.weight_offset)
        dx = g - xhat * (g * xhat).mean(-1, keepdim=True)
        if spec.centered:
            dx = dx - g.mean(-1, keepdim=True)
        dx = (dx * rstd).to(x.dtype)
    return dx, dweight, dbias


def _sum_rows(t: torch.Tensor) -> torch.Tensor:
    # Not by flattening first: that has no batching rule under `is_grads_batched`.
    return t.sum(list(range(t.dim() - 1))) if t.dim() > 1 else t

"""Every formula of `NormSpec` in plain torch: the oracle of the tests and the fallback where no kernel runs."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .formula import NormSpec


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
    compute = torch.promote_types(x.dtype, torch.float32)
    h = x.to(compute)
    if spec.centered:
        h = h - h.mean(-1, keepdim=True)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + spec.eps)
    h = h.to(spec.hat_dtype(x.dtype, weight_dtype))
    if weight is not None:
        if spec.weight_offset:
            weight = weight.to(torch.promote_types(weight.dtype, torch.float32)) + spec.weight_offset
            if spec.rounding != "once":
                weight = weight.to(weight_dtype)
        h = weight * h
    if bias is not None:
        h = h + bias
    return h.to(spec.output_dtype(x.dtype, weight_dtype))

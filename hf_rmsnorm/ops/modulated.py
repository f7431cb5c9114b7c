"""`modulated_norm`: a norm, the scale and shift of an adaptive LayerNorm, and a gated
sum before, in one launch.
"""

import torch

from ..formula import NormSpec
from .backend import autocasts_functional
from .direct import asks_by_parameters_alone, starts_kernels
from .forward import started, why_not_launched
from .launches import key_of, launches_of


def modulated_norm(
    spec: NormSpec, operands: tuple, one_plus: bool = True
) -> tuple[torch.Tensor | None, torch.Tensor] | None:
    """(h, ``norm(h) * (1 + scale) + shift``) of ``h = residual + factor * x``, bit for
    bit; None if not in one launch.

    As `AdaLayerNorm` of DiT (Peebles and Xie 2022) and of diffusers, whose operators
    round one by one.

    Args:
        operands: x, weight, bias, scale, shift, factor and residual. x is (...,
            hidden_size); weight and bias are (hidden_size,) or None, as the spec says.
            scale, shift and factor broadcast to x's shape, with the same strides there;
            shift and factor may be None. residual has x's shape, and is contiguous as x
            is then; or it is None: h is None, and x is what is normalised.
        one_plus: False where the norm is multiplied by the scale itself, as Z-Image
            prepares it.
    """
    x, *_, residual = operands
    if not starts_kernels(x):
        return None
    if spec.functional and autocasts_functional(spec, x.device.type):
        return None
    operands = _broadcast(*operands)
    if operands is None:
        return None
    asking = [t for t in operands if t is not None and t.requires_grad]
    graded = torch.is_grad_enabled() and bool(asking)
    if residual is not None:
        factor = operands[5]
        if asks_by_parameters_alone(graded, x, factor, residual):
            return None
    launches = launches_of(spec, "modulate_after" if one_plus else "multiply_after")
    key = key_of(("modulated", graded), operands)
    made = started(launches, key, operands, graded)
    if made is None or residual is not None:
        return made
    return None, made


def why_apart(spec: NormSpec, operands: tuple) -> str:
    """Why `modulated_norm` leaves such operands to the plain operators; "" where the
    reason is another.
    """
    if spec.gate is not None or spec.group_size is not None:
        return f"{spec} has a gate or groups"
    x, *_ = operands
    operands = _broadcast(*operands)
    if operands is None:
        return f"scale, shift or gate do not broadcast to x, which is {tuple(x.shape)}"
    return why_not_launched(spec, operands) or ""


def _broadcast(x, weight, bias, scale, shift, factor, residual) -> tuple | None:
    """The operands with a modulation of x's shape, which a kernel reads at the same
    addresses; small ones are copied for that. None where they do not broadcast.
    """
    modulation = [t for t in (scale, shift, factor) if t is not None]
    alike = len({(t.shape, t.stride()) for t in modulation}) == 1

    def expanded(t):
        if t is None:
            return None
        if not alike and t.numel() != x.numel():
            t = t.contiguous()
        return t.expand(x.shape)

    try:
        scale, shift, factor = map(expanded, (scale, shift, factor))
    except RuntimeError:
        # the plain operators say what does not broadcast, or broadcast x
        return None
    return x, weight, bias, scale, shift, factor, residual

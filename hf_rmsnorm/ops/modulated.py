"""`modulated_norm`: a norm, the scale and shift of an adaptive LayerNorm, and a gated
sum before, in one launch.
"""

from ..formula import NormSpec
from .forward import why_not_launched
from .launches import launches_of
from .norm import run


def modulated_norm(spec: NormSpec, operands: tuple, one_plus: bool = True):
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
    operands = _broadcast(*operands)
    if operands is None:
        return None
    modulation = "modulate_after" if one_plus else "multiply_after"
    launches = launches_of(spec, modulation)
    made = run(launches, operands)
    residual = operands[-1]
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


def _broadcast(x, weight, bias, *modulation_and_residual) -> tuple | None:
    """The operands with a modulation of x's shape, which a kernel reads at the same
    addresses; small ones are copied for that. None where they do not broadcast.
    """
    *modulation, residual = modulation_and_residual
    layouts = {(t.shape, t.stride()) for t in modulation if t is not None}
    expanded = []
    for t in modulation:
        if t is not None:
            if len(layouts) > 1 and t.numel() != x.numel():
                t = t.contiguous()
            try:
                t = t.expand(x.shape)
            except RuntimeError:
                # the plain operators say what does not broadcast, or broadcast x
                return None
        expanded.append(t)
    return x, weight, bias, *expanded, residual

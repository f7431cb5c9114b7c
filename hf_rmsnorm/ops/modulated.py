"""`modulated_norm`: a norm, the scale and shift of an adaptive LayerNorm, and a gated
sum before, in one launch.
"""

import torch

from ..formula import NormSpec
from ..kernels.failure import KernelUnavailable
from ..kernels.saved import Saved, require_saved
from ..reference import reference_norm
from .backend import autocasts_functional, give_up, why_not
from .direct import asks_by_parameters_alone, starts_kernels, state
from .gradients import norm_gradients
from .launches import MISSING, Launches, is_aligned, key_of, launches_of
from .loading import kernels


class _Modulated(torch.autograd.Function):
    """(the sum, the result) of `modulated_norm`; the sum is None where there is no
    residual.
    """

    @staticmethod
    def forward(ctx, x, residual, factor, weight, bias, scale, shift, call):
        launches, launch = call
        y, rstd, mean, h = launch.launch(
            x, weight, bias, *_expanded(x, scale, shift, factor), residual
        )
        of_factor = x if factor is not None and ctx.needs_input_grad[2] else None
        normed = x if h is None else h
        # A copy of the scale: the model may write to it before the backward.
        ctx.save_for_backward(
            of_factor, factor, normed, weight, bias, scale.clone(), rstd, mean
        )
        ctx.kept = launches, launch, normed.stride(), False
        ctx.factor_shape = None if factor is None else factor.shape
        ctx.scale = scale, state(scale)
        ctx.set_materialize_grads(False)
        return h, y

    @staticmethod
    def backward(ctx, dh, dy):
        x, factor, *operands = ctx.saved_tensors
        need, need_x, need_residual, need_factor = (
            ctx.needs_input_grad,
            *ctx.needs_input_grad[:3],
        )
        if factor is not None:
            like = dy if dh is None else dh
            expected = (
                Saved("x", like.shape, like.dtype),
                Saved("factor", ctx.factor_shape, like.dtype),
            )
            require_saved(like.device, expected, (x, factor))
        of_norm = None, None, None, None
        if dy is not None:
            of_norm = _norm_gradients(ctx, dy, *operands, (any(need[:3]), *need[3:6]))
        dtotal, *others = of_norm
        if dh is not None:
            dtotal = dh if dtotal is None else dh + dtotal
        dx = (
            dtotal
            if factor is None or not need_x or dtotal is None
            else dtotal * factor
        )
        gated = need_factor and dtotal is not None
        dfactor = (dtotal * x).sum_to_size(factor.shape) if gated else None
        dshift = dy if need[6] else None  # which autograd sums to the shift's shape
        return (
            dx if need_x else None,
            dtotal if need_residual else None,
            dfactor,
            *others,
            dshift,
            None,
        )


def _asks(operands: tuple) -> bool:
    return any(t is not None and t.requires_grad for t in operands)


def _laid_alike(x, *modulation) -> list:
    """The operands of a modulation, which a kernel reads at the same addresses; small
    ones are copied for that.
    """
    if len({(t.shape, t.stride()) for t in modulation if t is not None}) == 1:
        return modulation
    return [
        t if t is None or t.numel() == x.numel() else t.contiguous() for t in modulation
    ]


def _expanded(x, *modulation) -> list:
    return [t if t is None else t.expand(x.shape) for t in modulation]


def _norm_gradients(ctx, dy, h, weight, bias, scale, rstd, mean, need):
    """The gradients of h, the weight, the bias and the scale."""
    launches, launch, *_ = ctx.kept
    spec = launches.spec
    one_plus = launches.modulation == "modulate_after"
    if torch.is_grad_enabled():
        # create_graph differentiates by the scale that the forward was given
        scale = _scale_itself(scale, *ctx.scale)

    def formula(h, weight, bias, scale):
        return reference_norm(h, weight, bias, spec) * (
            1 + scale if one_plus else scale
        )

    saved = h, weight, bias, scale.expand(launch.shape), rstd, mean
    dh, dweight, dbias, dscale = norm_gradients(
        ctx.kept, saved, dy, None, need, formula
    )
    return (
        dh,
        dweight,
        dbias,
        None if dscale is None else dscale.sum_to_size(scale.shape),
    )


def _scale_itself(
    kept: torch.Tensor, scale: torch.Tensor, known: tuple
) -> torch.Tensor:
    require_saved(kept.device, (Saved("scale", kept.shape, kept.dtype),), (scale,))
    if state(scale) != known:
        raise RuntimeError(
            "create_graph=True differentiates by a scale that was written to since the forward"
        )
    return scale


def modulated_norm(
    x,
    weight,
    bias,
    spec: NormSpec,
    scale,
    shift=None,
    residual=None,
    factor=None,
    one_plus: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor] | None:
    """(h, ``norm(h) * (1 + scale) + shift``) of ``h = residual + factor * x``, bit for
    bit; None if not in one launch.

    As `AdaLayerNorm` of DiT (Peebles and Xie 2022) and of diffusers, whose operators
    round one by one.

    Args:
        x: (..., hidden_size).
        weight, bias: (hidden_size,) or None, as the spec says.
        scale, shift, factor: what broadcasts to x's shape, with the same strides there;
            shift and factor may be None.
        residual: x's shape, and contiguous as x is then; or None: h is None, and x is
            what is normalised.
        one_plus: False where the norm is multiplied by the scale itself, as Z-Image
            prepares it.
    """
    if not starts_kernels(x) or (
        spec.functional and autocasts_functional(spec, x.device.type)
    ):
        return None
    scale, shift, factor = _laid_alike(x, scale, shift, factor)
    operands = x, residual, factor, weight, bias, scale, shift
    graded = torch.is_grad_enabled() and _asks(operands)
    if residual is not None and asks_by_parameters_alone(graded, x, residual, factor):
        return None
    try:
        with torch.no_grad():
            read = x, weight, bias, *_expanded(x, scale, shift, factor), residual
    except RuntimeError:
        # the plain operators say what does not broadcast, or broadcast x
        return None
    launches = launches_of(spec, "modulate_after" if one_plus else "multiply_after")
    key = key_of(("modulated", graded), read)
    launch = None if key is None else launches.kept.get(key, MISSING)
    try:
        if launch is MISSING:
            launch = launches.keep(key, _made(launches, read, is_aligned(key), graded))
        if launch is None:
            return None
        if graded:
            return _Modulated.apply(*operands, (launches, launch))
        y, _, _, h = launch.launch(*read)
    except KernelUnavailable as error:
        give_up(error, x.device)
        return None
    return h, y


def _made(launches: Launches, read: tuple, aligned: bool, graded: bool):
    """The launch for such operands, or None where one launch does not compute this."""
    if why_not_modulated(launches.spec, read) is not None:
        return None
    return kernels().NormForward(
        launches.spec, read, aligned, graded, modulation=launches.modulation
    )


def why_not_modulated(spec: NormSpec, read: tuple) -> str | None:
    """Why one launch does not compute a modulated norm of such operands, or None where
    it does.
    """
    x, weight, bias, scale, shift, factor, residual = read
    return (
        _why_not_formula(spec)
        or _why_not_dtypes(x, read)
        or why_not(spec, x, weight, bias, None, residual)
        or _why_not_parameters(weight, bias)
        or _why_not_sum(x, residual)
        or _why_not_modulation(scale, shift, factor)
    )


def why_apart(
    x, weight, bias, spec: NormSpec, scale, shift=None, residual=None, factor=None
) -> str:
    """Why `modulated_norm` leaves such operands to the plain operators; "" where the
    reason is another.
    """
    try:
        read = (
            x,
            weight,
            bias,
            *_expanded(x, *_laid_alike(x, scale, shift, factor)),
            residual,
        )
    except RuntimeError:
        return f"scale, shift or gate do not broadcast to x, which is {tuple(x.shape)}"
    return why_not_modulated(spec, read) or ""


def _why_not_formula(spec: NormSpec) -> str | None:
    if spec.gate is not None or spec.group_size is not None:
        return f"{spec} has a gate or groups"
    return None


def _why_not_dtypes(x, read: tuple) -> str | None:
    names = "x", "weight", "bias", "scale", "shift", "gate", "residual"
    dtypes = {
        name: t.dtype for name, t in zip(names, read, strict=True) if t is not None
    }
    others = [
        f"{name} is {dtype}" for name, dtype in dtypes.items() if dtype != x.dtype
    ]
    return f"x is {x.dtype} and {', '.join(others)}" if others else None


def _why_not_parameters(weight, bias) -> str | None:
    if weight is not None and weight.dim() != 1:
        return "its weight is one of heads"
    if any(p is not None and not p.is_contiguous() for p in (weight, bias)):
        return "its weight or bias has gaps"
    return None


def _why_not_sum(x, residual) -> str | None:
    if residual is not None and not (x.is_contiguous() and residual.is_contiguous()):
        return "a summand has gaps"
    return None


def _why_not_modulation(scale, shift, factor) -> str | None:
    strides = {t.stride() for t in (scale, shift, factor) if t is not None}
    if len(strides) > 1:
        return "scale, shift and gate lie differently in memory"
    if scale.stride(-1) != 1:
        return "the scale has gaps, or is one number a row"
    return None

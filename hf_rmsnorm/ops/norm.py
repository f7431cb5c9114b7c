"""`rms_norm` and `layer_norm`: one call from eager, autograd, compiled, exported and checkpointed code alike."""

from functools import lru_cache

import torch

from ..formula import TORCH_RELEASE, NormSpec, Rounding
from ..kernels.failure import KernelUnavailable
from ..reference import in_groups, reference_norm
from .backend import give_up, resolve_backend
from .direct import LaunchCache, autocast_enabled, is_direct, under_transform
from .from_output import serves_as_input
from .gradients import norm_gradients
from .loading import kernels, load_sharding_rules
from .operators import norm_forward_op, spec_args

_is_compiling = torch.compiler.is_compiling
_lists_rms_norm = TORCH_RELEASE >= (2, 12)


class _FusedNorm(torch.autograd.Function):
    # Old-style (ctx in forward): setup_context costs 15 microseconds a call.
    @staticmethod
    def forward(ctx, x, weight, bias, gate, call):
        spec, plan, keep_output = call
        if plan is not None and (serve := plan.serve[True]) is not None:
            y, rstd, mean, _ = serve(x, weight, bias, gate, None, spec.eps)
        else:
            if plan is None and not _is_compiling() and is_direct(x, weight, bias, gate):
                plan = kernels().forward_plan(x, weight, bias, gate, spec)
            y, rstd, mean = _launch_forward(x, weight, bias, gate, spec, True, plan)[:3]
        keep_output = keep_output and serves_as_input(y, x, weight, bias, spec)
        kept, mean = (y, None) if keep_output else (x, mean)
        ctx.save_for_backward(kept, weight, bias, gate, rstd, mean)
        ctx.kept = spec, keep_output, plan, kept.stride()
        return y

    @staticmethod
    def backward(ctx, dy):
        grads = norm_gradients(dy, *ctx.saved_tensors, *ctx.kept, ctx.needs_input_grad[:4])
        return *grads, None


# What Function.apply adds is for arguments by name and for functorch, of which a planned call has neither.
_apply = super(torch.autograd.Function, _FusedNorm).apply


def _launch_forward(x, weight, bias, gate, spec, stats, plan=None):  # (y, rstd, mean, ...)
    if plan is None and (_is_compiling() or not is_direct(x, weight, bias, gate)):
        load_sharding_rules()
        return norm_forward_op(x, weight, bias, gate, *spec_args(spec), stats)
    return kernels().norm_forward(x, weight, bias, spec, stats, gate, None, plan)


def fused_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    spec: NormSpec,
    backend: str | None = None,
    gate: torch.Tensor | None = None,
    keep_output: bool = False,
) -> torch.Tensor:
    """Compute `spec` on x with the backend in force.

    Args:
        x: (..., hidden_size), any strides; rows may be empty.
        weight, bias: (hidden_size,), or (heads, hidden_size) where x is (..., heads, hidden_size), or None, as the
            spec says.
        backend: what `resolve_backend` answered, if the caller has asked already.
        gate: x's shape, where the spec has one.
        keep_output: the kernels' backward shall read the output, not x, where `serves_as_input`.

    Returns:
        (..., hidden_size) in ``spec.output_dtype``, with the strides that the Hugging Face module's output has.
    """
    if backend is None:
        backend = resolve_backend(x, weight, bias, spec, gate)
    if spec.functional:
        x, weight, bias = autocast_to_float32(spec, x, weight, bias)
    if backend != "triton" or (not _is_compiling() and under_transform()):
        return reference_norm(x, weight, bias, spec, gate)
    if spec.group_size is not None:
        x, weight, bias, gate = in_groups(spec.group_size, x, weight, bias, gate)
        return fused_norm(x, weight, bias, spec.ungrouped, backend, gate).flatten(-2)
    if (weight is not None and not weight.is_contiguous()) or (bias is not None and not bias.is_contiguous()):
        weight = None if weight is None else weight.contiguous()
        bias = None if bias is None else bias.contiguous()
    return launched_norm(x, weight, bias, gate, spec, None, keep_output)


def plan_of(x, weight, bias, spec, residual=None):
    """The launch of a norm, or of that of ``residual + x``, without gate on plain tensors that the kernels serve."""
    return kernels().forward_plan(x, weight, bias, None, spec, residual)


def launched_norm(x, weight, bias, gate, spec, plan, keep_output=False):
    """`fused_norm` where the kernels serve it; in plain torch where they turn out not to be loadable.

    Args:
        plan: what `plan_of` answered for such tensors; if None, the operator is called where that is to be seen.
        the rest: as in `fused_norm`; parameters contiguous.
    """
    try:
        if not torch.is_grad_enabled():
            if plan is not None and (serve := plan.serve[False]) is not None:
                return serve(x, weight, bias, gate, None, spec.eps)[0]
        elif (
            x.requires_grad
            or (weight is not None and weight.requires_grad)
            or (bias is not None and bias.requires_grad)
            or (gate is not None and gate.requires_grad)
        ):
            if _is_compiling():  # Dynamo does not trace an autograd.Function whose shapes are dynamic (PyTorch 2.13)
                return _launch_forward(x, weight, bias, gate, spec, True)[0]
            apply = _FusedNorm.apply if plan is None else _apply
            return apply(x, weight, bias, gate, (spec, plan, keep_output))
        return _launch_forward(x, weight, bias, gate, spec, False, plan)[0]
    except KernelUnavailable as error:
        give_up(error, x.device)
    return reference_norm(x, weight, bias, spec, gate)


def autocasts_functional(spec: NormSpec, device_type: str) -> bool:
    """Whether F.layer_norm, or F.rms_norm, computes in float32: is it on an accelerator's autocast list for that?"""
    return device_type != "cpu" and autocast_enabled(device_type) and (spec.centered or _lists_rms_norm)


def autocast_to_float32(spec: NormSpec, *tensors):
    """The operands of a functional norm as autocast hands them on."""
    if not autocasts_functional(spec, tensors[0].device.type):
        return tensors
    return tuple(t if t is None else t.to(torch.float32) for t in tensors)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    bias: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    rounding: Rounding = "before_weight",
) -> torch.Tensor:
    """RMSNorm over the last dimension (Zhang and Sennrich 2019): x / sqrt(mean(x^2) + eps) * (weight_offset + weight).

    Args:
        x: (..., hidden_size) in float32, float16, bfloat16 or (in plain torch) float64; any strides.
        weight: (hidden_size,) of any such dtype, or None.
        eps: added to the mean square.
        bias: (hidden_size,) or None.
        weight_offset: 1.0 for `GemmaRMSNorm`.
        rounding: as in `NormSpec`; the default is that of `LlamaRMSNorm`.

    Returns:
        (..., hidden_size); dtype as `NormSpec.output_dtype` says.

    Raises:
        TypeError: x is not a floating-point tensor.
        ValueError: shapes or devices do not fit, or eps is negative or not finite.

    Example:
        >>> import torch
        >>> from hf_rmsnorm import rms_norm
        >>> rms_norm(torch.tensor([3.0, -1.0, 4.0, -2.0]), torch.ones(4), eps=0.0)
        tensor([ 1.0954, -0.3651,  1.4606, -0.7303])
    """
    if weight is None:
        weight_offset, rounding = 0.0, "once"
    return _compute(x, weight, bias, eps, weight_offset, rounding)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, eps: float = 1e-5
) -> torch.Tensor:
    """LayerNorm over the last dimension (Ba et al. 2016), as `F.layer_norm`: autocast, dtypes and strides included.

    Args:
        x: (..., hidden_size), dtypes as in `rms_norm`.
        weight, bias: (hidden_size,) or None.
        eps: added to the variance.

    Returns:
        (..., hidden_size) in x's dtype (float32 under an accelerator's autocast), row-major.

    Raises:
        TypeError, ValueError: as `rms_norm`.
    """
    return _compute(x, weight, bias, eps, functional=True)


def _compute(x, weight, bias, eps, weight_offset=0.0, rounding="once", functional=False):
    if not isinstance(eps, (int, float)):
        raise ValueError(f"eps is {eps!r}: pass a finite float that is zero or more")
    formula = weight is not None, bias is not None, float(eps), weight_offset, rounding, functional
    if _is_compiling():
        spec, plans, key, plan = _spec(*formula), None, None, None
    else:
        spec, plans = _kept(*formula)
        key, plan = plans.find(x, weight, bias, functional)
    if plan is None:
        _check(x, weight, bias)
        backend = resolve_backend(x, weight, bias, spec)
        plan = None if key is None else plans.keep(key, backend, plan_of, x, weight, bias, spec)
        if plan is None:
            return fused_norm(x, weight, bias, spec, backend)
    return launched_norm(x, weight, bias, None, spec, plan)


def _spec(has_weight, has_bias, eps, weight_offset, rounding, functional) -> NormSpec:
    return NormSpec(
        centered=functional, eps=eps, has_weight=has_weight, has_bias=has_bias, weight_offset=weight_offset,
        rounding=rounding, functional=functional,
    )  # fmt: skip


@lru_cache(256)
def _kept(*formula) -> tuple[NormSpec, LaunchCache]:
    return _spec(*formula), LaunchCache()


def _check(x, weight, bias) -> None:
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        got = f"a tensor of {x.dtype}" if isinstance(x, torch.Tensor) else type(x).__name__
        raise TypeError(f"x is {got}: pass a floating-point tensor, for example x.float()")
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"x has shape {tuple(x.shape)}: the last dimension must hold at least one element")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is None:
            continue
        if not isinstance(parameter, torch.Tensor) or not parameter.is_floating_point():
            got = f"a tensor of {parameter.dtype}" if isinstance(parameter, torch.Tensor) else type(parameter).__name__
            raise TypeError(f"{name} is {got}: pass a floating-point tensor")
        if parameter.shape != x.shape[-1:]:
            raise ValueError(f"{name} has shape {tuple(parameter.shape)}, x {tuple(x.shape)}: pass ({x.shape[-1]},)")
        if parameter.device != x.device:
            raise ValueError(f"{name} is on {parameter.device} and x on {x.device}: move one of them")

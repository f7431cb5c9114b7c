"""`rms_norm` and `layer_norm`: one call from eager, autograd, compiled, exported and checkpointed code alike."""

from __future__ import annotations

from functools import lru_cache

import torch

from ..formula import NormSpec, Rounding
from ..reference import in_groups, input_of_output, reference_backward, reference_norm
from .backend import Plans, kernels, likeness, plain, resolve_backend, transformed
from .from_output import note_backward, serves_as_input
from .operators import as_saved, contiguous_output, norm_backward_op, norm_forward_op, spec_args, teach_dtensor

_is_compiling = torch.compiler.is_compiling


class _FusedNorm(torch.autograd.Function):
    # Old-style (ctx in forward): setup_context costs 15 microseconds a call.
    @staticmethod
    def forward(ctx, x, weight, bias, gate, call):
        spec, plan, known, keep_output = call
        y, rstd, mean = known or _launch_forward(x, weight, bias, gate, spec, True, plan)[:3]
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


def norm_gradients(dy, x, weight, bias, gate, rstd, mean, spec, from_output, plan, strides, need, dh=None):
    """(dx, dweight, dbias, dgate) inside a backward, in whatever that runs; `dh`, another gradient of x, is in dx.

    Under `from_output` x is what the norm returned. `plan` is that of the forward, if one was made, and `strides` are
    those that x had there.
    """
    dh = dh if need[0] else None
    x, weight, bias, rstd, mean = as_saved(strides, x, weight, bias, rstd, mean)
    compiling = _is_compiling()
    watched = not compiling and (torch.is_grad_enabled() or transformed() or _batched(dy) or _batched(dh))
    if from_output:
        note_backward()
    if not (compiling or watched) and plain(dy, x, weight, bias, gate, dh):
        return _launch_backward(dy, x, weight, bias, gate, dh, rstd, mean, spec, from_output, plan, need)
    if from_output:
        return _gradients_from_output(dy, x, weight, bias, rstd, spec, need, dh)
    if watched:
        if torch.is_grad_enabled():  # create_graph: the formula itself is differentiable
            grads = _differentiable_backward(dy, x, weight, bias, gate, spec, need)
        else:
            grads = reference_backward(dy, x, weight, bias, spec, need, gate)
        return grads if dh is None else (dh + grads[0], *grads[1:])
    mean = rstd.new_empty(0) if mean is None else mean
    grads = norm_backward_op(dy, x, weight, bias, gate, dh, rstd, mean, *spec_args(spec), list(need))
    return [grad if needed else None for grad, needed in zip(grads, need, strict=True)]


def _launch_backward(dy, x, weight, bias, gate, dh, rstd, mean, spec, from_output, plan, need):
    launch = kernels()
    if plan is None:
        row_major = contiguous_output(spec)
        return launch.norm_backward(dy, x, weight, bias, rstd, mean, spec, need, row_major, gate, dh, from_output)
    # The rest is as in the forward.
    like = dy.stride(), dy.dtype, need, from_output, None if dh is None else (dh.stride(), dh.dtype)
    backward = plan.backward.get(like)
    if backward is None:
        limits = launch.device_limits(x.device.type, x.device.index)
        backward = plan.backward[like] = launch.backward_plan(
            dy, x, weight, bias, gate, spec, need, contiguous_output(spec), limits, dh, from_output
        )
    return launch.run_backward(backward, dy, x, weight, bias, rstd, mean, spec.eps, need, gate, dh)


def _gradients_from_output(dy, y, weight, bias, rstd, spec, need, dh):
    if not _is_compiling() and torch.is_grad_enabled():
        raise RuntimeError(
            "create_graph=True differentiates a norm twice, for which it needs its input, and it keeps its output "
            "instead: call patch_model(model, memory_efficient=False) first"
        )
    x = input_of_output(y, weight, bias, rstd, spec)
    dx, *grads = reference_backward(dy, x, weight, bias, spec, need)
    if dx is not None:
        dx = (dx if dh is None else dh + dx).to(y.dtype)
    return dx, *grads


def _launch_forward(x, weight, bias, gate, spec, stats, plan=None):  # (y, rstd, mean, ...)
    if plan is None:
        if _is_compiling() or not plain(x, weight, bias, gate):
            teach_dtensor()
            return norm_forward_op(x, weight, bias, gate, *spec_args(spec), stats)
        return kernels().norm_forward(x, weight, bias, spec, stats, contiguous_output(spec), gate)
    return kernels().run_forward(plan, x, weight, bias, gate, None, spec.eps, stats)


def _differentiable_backward(dy, x, weight, bias, gate, spec, need):
    with torch.enable_grad():
        # Through views of their own: where x was itself computed from the same weight, the gradient asked for is the
        # one along this norm alone.
        inputs = [t if t is None else t.view_as(t) for t in (x, weight, bias, gate)]
        y = reference_norm(*inputs[:3], spec, inputs[3])
        wanted = [t for t, needed in zip(inputs, need, strict=True) if needed]
        grads = iter(torch.autograd.grad(y, wanted, dy, create_graph=True))
    return [next(grads) if needed else None for needed in need]


def fused_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    spec: NormSpec,
    backend: str | None = None,
    gate: torch.Tensor | None = None,
    known: tuple | None = None,
    keep_output: bool = False,
) -> torch.Tensor:
    """Compute `spec` on x with the backend in force.

    Args:
        x: (..., hidden_size), any strides; rows may be empty.
        weight, bias: (hidden_size,), or (heads, hidden_size) where x is (..., heads, hidden_size), or None, as the
            spec says.
        backend: what `resolve_backend` answered, if the caller has asked already.
        gate: x's shape, where the spec has one.
        known: (y, rstd, mean) of just this, in no graph, where a launch has computed it already.
        keep_output: what `keeps_output` answered: the kernels' backward shall read the output, not x.

    Returns:
        (..., hidden_size) in ``spec.output_dtype``, with the strides that the Hugging Face module's output has.
    """
    if backend is None:
        backend = resolve_backend(x, weight, bias, spec, gate)
    if spec.functional:
        x, weight, bias = autocast_to_float32(x, weight, bias)
    if backend != "triton" or (not _is_compiling() and transformed()):
        return reference_norm(x, weight, bias, spec, gate)
    if spec.group_size is not None:
        x, weight, bias, gate = in_groups(spec.group_size, x, weight, bias, gate)
        return fused_norm(x, weight, bias, spec.ungrouped, backend, gate).flatten(-2)
    if (weight is not None and not weight.is_contiguous()) or (bias is not None and not bias.is_contiguous()):
        weight = None if weight is None else weight.contiguous()
        bias = None if bias is None else bias.contiguous()
    return launched_norm(x, weight, bias, gate, spec, None, known, keep_output)


def plan_of(x, weight, bias, spec, residual=None):
    """The launch of a norm, or of that of ``residual + x``, without gate on plain tensors that the kernels serve."""
    return kernels().forward_plan(x, weight, bias, None, spec, contiguous_output(spec), residual)


def launched_norm(x, weight, bias, gate, spec, plan, known=None, keep_output=False):
    """`fused_norm` where the kernels serve it.

    Args:
        plan: what `plan_of` answered for such tensors; if None, the operator is called where that is to be seen.
        the rest: as in `fused_norm`; parameters contiguous.
    """
    if torch.is_grad_enabled() and (
        x.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
        or (gate is not None and gate.requires_grad)
    ):
        if _is_compiling():  # Dynamo does not trace an autograd.Function whose shapes are dynamic (PyTorch 2.13)
            return _launch_forward(x, weight, bias, gate, spec, True)[0]
        apply = _FusedNorm.apply if plan is None else _apply
        return apply(x, weight, bias, gate, (spec, plan, known, keep_output))
    return known[0] if known is not None else _launch_forward(x, weight, bias, gate, spec, False, plan)[0]


def _batched(t: torch.Tensor | None) -> bool:
    return t is not None and torch._C._functorch.is_legacy_batchedtensor(t)


def autocasts_functional(device_type: str) -> bool:
    """Whether F.layer_norm and F.rms_norm compute in float32: they are on every accelerator's autocast list for it."""
    return device_type != "cpu" and torch.is_autocast_enabled(device_type)


def autocast_to_float32(*tensors):
    """The operands of a functional norm as autocast hands them on."""
    if not autocasts_functional(tensors[0].device.type):
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
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
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
        spec, plans, like = _spec(*formula), None, None
    else:
        spec, plans = _kept(*formula)
        like = likeness(x, weight, bias, functional)
    plan = None if like is None else plans.get(like)
    if plan is None:
        _check(x, weight, bias)
        backend = resolve_backend(x, weight, bias, spec)
        if like is None or backend != "triton":
            return fused_norm(x, weight, bias, spec, backend)
        plan = plans.keep(like, plan_of(x, weight, bias, spec))
    return launched_norm(x, weight, bias, None, spec, plan)


def _spec(has_weight, has_bias, eps, weight_offset, rounding, functional) -> NormSpec:
    return NormSpec(
        centered=functional, eps=eps, has_weight=has_weight, has_bias=has_bias, weight_offset=weight_offset,
        rounding=rounding, functional=functional,
    )  # fmt: skip


@lru_cache(256)
def _kept(*formula) -> tuple[NormSpec, Plans]:
    return _spec(*formula), Plans()


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

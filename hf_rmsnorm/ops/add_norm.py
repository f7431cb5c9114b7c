"""`fused_add_norm`: the residual add and the norm behind it in one launch, forward and backward."""

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..formula import NormSpec, promoted
from ..kernels.failure import KernelUnavailable
from ..kernels.serves import unserved
from ..reference import reference_norm
from .backend import KERNEL_DTYPES, give_up, resolve_backend
from .direct import DIRECT_TYPES, is_direct, under_transform
from .from_output import serves_as_input
from .gradients import norm_gradients
from .loading import is_dtensor, kernels, load_sharding_rules
from .norm import autocast_to_float32, autocasts_functional, fused_norm
from .operators import add_norm_forward_op, spec_args

_is_compiling = torch.compiler.is_compiling


class _FusedAddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, bias, call):
        spec, plan, keep_output = call
        h, y, rstd, mean = _launch(x, residual, weight, bias, spec, plan, True)
        keep_output = keep_output and serves_as_input(y, h, weight, bias, spec)
        kept, mean = (y, None) if keep_output else (h, mean)
        ctx.save_for_backward(kept, weight, bias, rstd, mean)
        ctx.kept = spec, keep_output, plan, kept.stride()
        if not _is_compiling():  # Dynamo does not know it, and passes zeros
            ctx.set_materialize_grads(False)
        return h, y

    @staticmethod
    def backward(ctx, dh, dy):
        need_x, need_residual, *need_parameters = ctx.needs_input_grad[:4]
        if dy is None:
            dsum, dweight, dbias = dh, None, None
        else:
            h, weight, bias, rstd, mean = ctx.saved_tensors
            need = (need_x or need_residual, *need_parameters, False)
            dsum, dweight, dbias, _ = norm_gradients(dy, h, weight, bias, None, rstd, mean, *ctx.kept, need, dh)
        return dsum if need_x else None, dsum if need_residual else None, dweight, dbias, None


def _launch(x, residual, weight, bias, spec, plan, stats):
    if plan is None and (_is_compiling() or not is_direct(x, residual, weight, bias)):
        load_sharding_rules()
        return add_norm_forward_op(x, residual, weight, bias, *spec_args(spec), stats)
    y, rstd, mean, h = kernels().norm_forward(x, weight, bias, spec, stats, None, residual, plan)
    return h, y, rstd, mean


def add_norm_backend(x, residual, weight, bias, spec: NormSpec) -> str:
    """What `fused_add_norm` makes of a call: ``"triton"`` (one launch), ``"reference"``, or ``"original"``.

    ``"original"`` is the answer where x and residual differ in shape or device, or are float16 and bfloat16; where no
    kernel computes the formula behind a sum (a gate, groups), or a parameter has heads; for wrappers of tensors other
    than DTensors; where autocast gives the norm another dtype than the sum; and where `resolve_backend` says so.

    Raises:
        RuntimeError: as `resolve_backend`.
    """
    if unserved(spec, "residual sum") is not None:
        return "original"
    backend = resolve_backend(x, weight, bias, spec)
    if backend != "triton":
        return backend
    if x.shape != residual.shape or x.device != residual.device or residual.dtype not in KERNEL_DTYPES:
        return "original"
    dtype = promoted(x.dtype, residual.dtype)
    if dtype not in (x.dtype, residual.dtype):
        return "original"
    for t in (x, residual, weight, bias):
        if type(t) not in DIRECT_TYPES and is_traceable_wrapper_subclass(t) and not is_dtensor(t):
            return "original"
    if (weight is not None and weight.dim() != 1) or (bias is not None and bias.dim() != 1):
        return "original"
    if spec.functional and dtype != torch.float32 and autocasts_functional(spec, x.device.type):
        return "original"
    return "triton"


def fused_add_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    spec: NormSpec,
    backend: str | None = None,
    keep_output: bool = False,
    plan=None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``h = residual + x`` and the norm of h, as a decoder layer computes them, in one launch.

    h is rounded to its dtype before it is normalised, and y is then, bit for bit, what the norm's kernel alone makes of
    h (on a GPU: where x and residual start and step by multiples of 16 bytes, as a model's do). Only h, the parameters
    and (rows,) statistics are kept for the backward, which adds the gradient of h to the norm's in one launch too,
    rounded once: x and residual share it.

    Args:
        x: (..., hidden_size), any strides: what the attention or MLP returned.
        residual: the same shape, any strides; of x's dtype, or one of the two is float32, as under autocast.
        weight, bias: (hidden_size,) or None, as the spec says.
        backend: what `add_norm_backend` answered, if the caller has asked already.
        keep_output: y is kept for the backward, not h, where `serves_as_input`.
        plan: what `plan_of` answered for such tensors.

    Returns:
        (h, y): h as ``residual + x`` returns it, y in ``spec.output_dtype``, each with the strides it has in eager.
    """
    if plan is not None:
        return _fused(x, residual, weight, bias, spec, plan, keep_output)
    if backend is None:
        backend = add_norm_backend(x, residual, weight, bias, spec)
    if backend != "triton" or (not _is_compiling() and under_transform()):
        h = residual + x
        return h, reference_norm(h, weight, bias, spec) if backend != "original" else fused_norm(h, weight, bias, spec)
    if spec.functional:
        _, weight, bias = autocast_to_float32(spec, x, weight, bias)
    if (weight is not None and not weight.is_contiguous()) or (bias is not None and not bias.is_contiguous()):
        weight = None if weight is None else weight.contiguous()
        bias = None if bias is None else bias.contiguous()
    if not _is_compiling() and is_direct(x, residual, weight, bias):
        plan = kernels().forward_plan(x, weight, bias, None, spec, residual)
    return _fused(x, residual, weight, bias, spec, plan, keep_output)


def _fused(x, residual, weight, bias, spec, plan, keep_output):
    try:
        if torch.is_grad_enabled() and (
            x.requires_grad
            or residual.requires_grad
            or (weight is not None and weight.requires_grad)
            or (bias is not None and bias.requires_grad)
        ):
            return _FusedAddNorm.apply(x, residual, weight, bias, (spec, plan, keep_output))
        return _launch(x, residual, weight, bias, spec, plan, False)[:2]
    except KernelUnavailable as error:
        give_up(error, x.device)
    h = residual + x
    return h, reference_norm(h, weight, bias, spec)

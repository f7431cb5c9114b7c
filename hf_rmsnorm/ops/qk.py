"""The norms of queries and keys in one launch, with the rotary embedding that follows them where there is one."""

from __future__ import annotations

from functools import cache

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..formula import NormSpec
from ..reference import reference_backward, reference_norm, reference_stats
from .backend import MAX_ROWS, PLAIN_TYPES, device_refusal, likeness, plain, resolve_backend, transformed
from .norm import _batched, _is_compiling
from .operators import _SPEC, _library, _none, contiguous_output, is_dtensor, spec_args, spec_from, teach_dtensor

MAX_HEAD_DIM = 512  # a tile holds several rows, and both halves of each


def reference_qk_norm(q, k, q_weight, k_weight, spec: NormSpec, cos=None, sin=None):
    """`fused_qk_norm` in the operators of Hugging Face's attention layers, bit-equal to them on the same device."""
    normed = (reference_norm(q, q_weight, None, spec), reference_norm(k, k_weight, None, spec))
    return normed if cos is None else tuple(rotated(y, cos, sin) for y in normed)


def rotated(y, cos, sin, back: bool = False):
    """`apply_rotary_pos_emb` of one tensor, or (`back`) the gradient in front of it.

    Args:
        y: (batch, heads, length, head_dim).
        cos, sin: (batch or 1, length, columns); the columns of y behind those pass.
    """
    columns = cos.shape[-1]
    if columns != y.shape[-1]:
        return torch.cat([rotated(y[..., :columns], cos, sin, back), y[..., columns:]], dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    # rotate_half transposed is its negative.
    return y * cos - _rotate_half(y * sin) if back else y * cos + _rotate_half(y) * sin


def _rotate_half(y):
    half = y.shape[-1] // 2
    return torch.cat((-y[..., half:], y[..., :half]), dim=-1)


def _reference_backward(dq, dk, q, k, q_weight, k_weight, cos, sin, spec, need):
    """The closed-form gradients (dq, dk, dq_weight, dk_weight) in plain torch, None where `need` is False."""

    def side(dy, x, weight, need_x, need_weight):
        if dy is None or not (need_x or need_weight):
            return None, None
        dy = dy if cos is None else rotated(dy, cos, sin, back=True)
        return reference_backward(dy, x, weight, None, spec, (need_x, need_weight, False))[:2]

    dxq, dwq = side(dq, q, q_weight, need[0], need[2])
    dxk, dwk = side(dk, k, k_weight, need[1], need[3])
    return dxq, dxk, dwq, dwk


def _differentiable_backward(dq, dk, *operands):
    *tensors, cos, sin, spec, need = operands
    with torch.enable_grad():
        inputs = [t if t is None else t.view_as(t) for t in tensors]  # views of their own, as in `fused_norm`
        outputs = reference_qk_norm(*inputs, spec, cos, sin)
        outputs, grads = zip(*((y, d) for y, d in zip(outputs, (dq, dk), strict=True) if d is not None), strict=True)
        wanted = [t for t, needed in zip(inputs, need, strict=True) if needed]
        grads = iter(torch.autograd.grad(outputs, wanted, grads, create_graph=True, allow_unused=True))
    return [next(grads) if needed else None for needed in need]


class _FusedQKNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, q_weight, k_weight, cos, sin, spec, plan):
        yq, yk, rstd, mean = _launch_forward(q, k, q_weight, k_weight, cos, sin, spec, True, plan)
        ctx.save_for_backward(q, k, q_weight, k_weight, cos, sin, rstd, mean)
        ctx.spec = spec
        ctx.set_materialize_grads(False)
        return yq, yk

    @staticmethod
    def backward(ctx, dq, dk):
        *operands, rstd, mean = _as_saved(ctx.saved_tensors)
        need = ctx.needs_input_grad[:4]
        if dq is None and dk is None:
            grads = (None,) * 4
        elif _is_compiling() or not (torch.is_grad_enabled() or transformed() or _batched(dq) or _batched(dk)):
            grads = _launch_backward(dq, dk, operands, rstd, mean, ctx.spec, need)
        elif torch.is_grad_enabled():  # create_graph: the formula itself is differentiable
            grads = _differentiable_backward(dq, dk, *operands, ctx.spec, need)
        else:
            grads = _reference_backward(dq, dk, *operands, ctx.spec, need)
        return *grads, None, None, None, None


@cache
def kernels():
    """The launch code, which needs triton."""
    from ..kernels import launch_qk

    return launch_qk


def _launch_forward(q, k, q_weight, k_weight, cos, sin, spec, stats, plan=None):
    if plan is not None:
        return kernels().run_forward(plan, q, k, q_weight, k_weight, cos, sin, spec.eps, stats)
    if _is_compiling() or not plain(q, k, q_weight, k_weight, cos, sin):
        teach_dtensor()
        stats = stats and not is_dtensor(q)  # statistics of q and k behind one another are no rows of either to split
        return qk_norm_forward_op(q, k, q_weight, k_weight, cos, sin, *spec_args(spec), stats)
    return kernels().qk_norm_forward(q, k, q_weight, k_weight, cos, sin, spec, stats, contiguous_output(spec))


def qk_likeness(q, k, q_weight, k_weight, spec: NormSpec, cos=None, sin=None) -> tuple | None:
    """As `likeness`, of what `fused_qk_norm` is given."""
    casts = spec.functional or spec.rounding == "every_step"
    of_q, of_k = likeness(q, q_weight, None, casts), likeness(k, k_weight, None, casts)
    if of_q is None or of_k is None:
        return None
    if cos is None or sin is None:
        return of_q, of_k, cos is sin
    if type(cos) not in PLAIN_TYPES or type(sin) not in PLAIN_TYPES:
        return None
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        return None
    return of_q, of_k, cos.shape, cos.stride(), cos.dtype, cos.device, sin.shape, sin.stride(), sin.dtype, sin.device


def qk_plan_of(q, k, q_weight, spec: NormSpec, cos=None):
    """The launch on plain tensors that `qk_norm_backend` gives to Triton."""
    return kernels().forward_plan(q, k, q_weight, cos, spec, contiguous_output(spec))


def _as_saved(tensors) -> tuple:
    """Columns of unit stride, as the kernels read them: hooks of saved tensors may give them back in others."""
    cos, sin = tensors[4:6]
    if all(t is None or t.stride(-1) == 1 for t in tensors) and (cos is None or cos.stride() == sin.stride()):
        return tensors
    return tuple(t if t is None else t.contiguous() for t in tensors)


def _launch_backward(dq, dk, operands, rstd, mean, spec, need):
    if _is_compiling() or not plain(*operands, dq, dk):
        mean = rstd.new_empty(0) if mean is None else mean
        grads = qk_norm_backward_op(dq, dk, *operands, rstd, mean, *spec_args(spec), list(need))
        given = (dq, dk, dq, dk)
        return [g if n and d is not None else None for g, n, d in zip(grads, need, given, strict=True)]
    return kernels().qk_norm_backward(dq, dk, *operands, rstd, mean, spec, tuple(need))


def fused_qk_norm(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    spec: NormSpec,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    backend: str | None = None,
    plan=None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise the heads of q and of k, then turn them by the rotary embedding if cos and sin are given.

    The norm is `spec` on both, rounded to x's dtype; the rotary embedding is `apply_rotary_pos_emb` of the Llama family
    (Su et al. 2021), each of its operators rounded.

    Args:
        q: (batch, heads, length, head_dim), and k: (batch, key heads, length, head_dim), of any strides: transposed
            views and slices of a packed projection are read in place.
        q_weight, k_weight: (head_dim,), or None as the spec says.
        cos, sin: (batch or 1, length, head_dim) in x's dtype; or fewer, even columns: the columns behind them pass.
        backend: what `qk_norm_backend` answered, if the caller has asked already.
        plan: what `qk_plan_of` answered for such tensors.

    Returns:
        (q', k') in the dtypes and strides that the same operators in plain torch give.
    """
    if plan is None:
        if backend is None:
            backend = qk_norm_backend(q, k, q_weight, k_weight, spec, cos, sin)
        if backend != "triton" or (not _is_compiling() and transformed()):
            return reference_qk_norm(q, k, q_weight, k_weight, spec, cos, sin)
    if torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or (q_weight is not None and (q_weight.requires_grad or k_weight.requires_grad))
    ):
        if _is_compiling():  # as in `fused_norm`
            return _launch_forward(q, k, q_weight, k_weight, cos, sin, spec, True)[:2]
        return _FusedQKNorm.apply(q, k, q_weight, k_weight, cos, sin, spec, plan)
    return _launch_forward(q, k, q_weight, k_weight, cos, sin, spec, False, plan)[:2]


def qk_norm_backend(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    spec: NormSpec,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
) -> str:
    """What serves `fused_qk_norm`: as `resolve_backend`, but ``"original"`` also for whatever one launch cannot do.

    Raises:
        RuntimeError: as `resolve_backend`.
    """
    if not _fits(q, k, q_weight, k_weight, spec, cos, sin):
        return "original"
    # Under autocast these have operators of torch that compute in float32.
    if (spec.functional or spec.rounding == "every_step") and torch.is_autocast_enabled(q.device.type):
        return "original"
    if cos is not None and torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        return "original"
    return resolve_backend(q, q_weight, None, spec)


def _fits(q, k, q_weight, k_weight, spec, cos, sin) -> bool:
    """Whether types, formula, shapes, dtypes, devices and strides are such as the kernels take, device aside."""
    if spec.gate is not None or spec.group_size is not None or spec.weight_first or spec.has_bias:
        return False
    if (q_weight is None) == spec.has_weight or (k_weight is None) == spec.has_weight or (cos is None) != (sin is None):
        return False
    dtype, device = q.dtype, q.device
    for t in (q, k, q_weight, k_weight, cos, sin):
        if t is not None:
            if type(t) not in PLAIN_TYPES and not isinstance(t, FakeTensor) and not is_dtensor(t):
                return False
            if t.dtype != dtype or t.device != device:
                return False
    if q.dim() != 4 or k.dim() != 4:
        return False
    batch, _, length, head_dim = q.shape
    k_batch, _, k_length, k_dim = k.shape
    if k_batch != batch or k_length != length or k_dim != head_dim or not 1 <= head_dim <= MAX_HEAD_DIM:
        return False
    if q.stride(3) != 1 or k.stride(3) != 1:
        return False
    if q_weight is not None:
        shape = (head_dim,)
        if q_weight.shape != shape or k_weight.shape != shape:
            return False
        if not (q_weight.is_contiguous() and k_weight.is_contiguous()):
            return False
    if cos is not None:
        if cos.dim() != 3 or cos.shape != sin.shape or cos.stride() != sin.stride() or cos.stride(2) != 1:
            return False
        tables, positions, columns = cos.shape
        if positions != length or (tables != 1 and tables != batch) or columns > head_dim or columns % 2 or not columns:
            return False
    # Not while compiling: it would bound a dynamic batch, and the operator asks again at run time.
    return _is_compiling() or q.numel() + k.numel() <= MAX_ROWS * head_dim


_QK = "Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, Tensor? cos, Tensor? sin"
_library.define(f"qk_norm_forward({_QK}, {_SPEC}, bool stats) -> (Tensor, Tensor, Tensor, Tensor)")
_library.define(
    f"qk_norm_backward(Tensor? dq, Tensor? dk, {_QK}, Tensor rstd, Tensor mean, {_SPEC}, bool[] need) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
qk_norm_forward_op = torch.ops.hf_rmsnorm.qk_norm_forward.default
qk_norm_backward_op = torch.ops.hf_rmsnorm.qk_norm_backward.default


def _served(q, k, q_weight, k_weight, cos, sin, spec) -> bool:
    return (
        plain(q, k, q_weight, k_weight, cos, sin)
        and _fits(q, k, q_weight, k_weight, spec, cos, sin)
        and device_refusal(q.device.type, q.device.index) is None
    )


def _rows(x):
    """x with its rows in the order of the kernels: heads fastest."""
    return x.transpose(1, 2)


def _forward(q, k, q_weight, k_weight, cos, sin, *formula):
    *fields, stats = formula
    spec = spec_from(q_weight, None, *fields)
    if _served(q, k, q_weight, k_weight, cos, sin, spec):
        yq, yk, rstd, mean = kernels().qk_norm_forward(
            q, k, q_weight, k_weight, cos, sin, spec, stats, contiguous_output(spec)
        )
        return yq, yk, _none(q) if rstd is None else rstd, _none(q) if mean is None else mean
    yq, yk = reference_qk_norm(q, k, q_weight, k_weight, spec, cos, sin)
    if not stats:
        return yq, yk, _none(q), _none(q)
    rstd, mean = zip(*(reference_stats(_rows(x), spec) for x in (q, k)), strict=True)
    return yq, yk, torch.cat(rstd), torch.cat(mean) if spec.centered else _none(q)


def _backward(dq, dk, q, k, q_weight, k_weight, cos, sin, rstd, mean, *formula):
    *fields, need = formula
    spec = spec_from(q_weight, None, *fields)
    if _served(q, k, q_weight, k_weight, cos, sin, spec) and plain(dq, dk):
        if not rstd.numel():  # of DTensors, whose forward kept none
            *_, rstd, mean = kernels().qk_norm_forward(q, k, q_weight, k_weight, cos, sin, spec, True, False)
        mean = mean if spec.centered else None
        grads = kernels().qk_norm_backward(dq, dk, q, k, q_weight, k_weight, cos, sin, rstd, mean, spec, tuple(need))
    else:
        grads = list(_reference_backward(dq, dk, q, k, q_weight, k_weight, cos, sin, spec, need))
        grads[:2] = (g if g is None else torch.empty_like(x).copy_(g) for g, x in zip(grads, (q, k), strict=False))
    return tuple(_none(q) if g is None else g for g in grads)


_library.impl("qk_norm_forward", _forward, "CompositeExplicitAutograd")
_library.impl("qk_norm_backward", _backward, "CompositeExplicitAutograd")


@torch.library.register_fake("hf_rmsnorm::qk_norm_forward", lib=_library)
def _(q, k, q_weight, k_weight, cos, sin, *formula):
    *fields, stats = formula
    spec = spec_from(q_weight, None, *fields)
    rows = q.shape[0] * q.shape[2] * (q.shape[1] + k.shape[1])
    rstd = q.new_empty(rows, dtype=torch.float32) if stats else _none(q)
    mean = q.new_empty(rows, dtype=torch.float32) if stats and spec.centered else _none(q)
    return *reference_qk_norm(q, k, q_weight, k_weight, spec, cos, sin), rstd, mean


@torch.library.register_fake("hf_rmsnorm::qk_norm_backward", lib=_library)
def _(dq, dk, q, k, q_weight, k_weight, cos, sin, rstd, mean, *formula):
    need = formula[-1]
    grads = zip((q, k, q_weight, k_weight), (dq, dk, dq, dk), need, strict=True)
    return tuple(torch.empty_like(t) if n and d is not None else _none(q) for t, d, n in grads)


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:6], *output[2:])
    ctx.formula = inputs[6:-1]


def _gradients(ctx, dq, dk, *_):
    need = list(ctx.needs_input_grad[:4])
    grads = qk_norm_backward_op(dq, dk, *_as_saved(ctx.saved_tensors), *ctx.formula, need)
    wanted = [grad if needed else None for grad, needed in zip(grads, need, strict=True)]
    return *wanted, *[None] * (len(ctx.formula) + 3)


torch.library.register_autograd("hf_rmsnorm::qk_norm_forward", _gradients, setup_context=_keep, lib=_library)

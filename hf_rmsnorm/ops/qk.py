"""The norms of queries and keys in one launch, with the rotary embedding that follows them where there is one."""

import torch

from ..formula import NormSpec
from ..kernels.failure import KernelUnavailable
from ..reference import as_normed, by_heads, reference_norm, reference_qk_norm, rotated
from .backend import give_up, qk_fits, resolve_backend
from .direct import DIRECT_TYPES, autocast_enabled, is_direct, under_transform
from .gradients import qk_gradients
from .loading import is_dtensor, load_sharding_rules, qk_kernels
from .norm import fused_norm
from .operators import qk_norm_forward_op, spec_args

_is_compiling = torch.compiler.is_compiling


class _FusedQKNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, q_weight, k_weight, q_bias, k_bias, cos, sin, spec, way, plan):
        parameters = q_weight, k_weight, q_bias, k_bias
        if plan is None and is_direct(q, k, *parameters, cos, sin):
            plan = qk_plan_of(q, k, parameters[:2], spec, cos, way)
        yq, yk, rstd, mean = _launch_forward(q, k, parameters, cos, sin, spec, True, way, plan)
        ctx.save_for_backward(q, k, *parameters, cos, sin, rstd, mean)
        ctx.call = spec, way, plan
        ctx.set_materialize_grads(False)
        return yq, yk

    @staticmethod
    def backward(ctx, dq, dk):
        spec, way, plan = ctx.call
        grads = qk_gradients(dq, dk, ctx.saved_tensors, spec, ctx.needs_input_grad[:6], way, plan)
        return *grads, None, None, None, None, None


def _launch_forward(q, k, parameters, cos, sin, spec, stats, way, plan=None):
    if plan is None and (_is_compiling() or not is_direct(q, k, *parameters, cos, sin)):
        load_sharding_rules()
        stats = stats and not is_dtensor(q)  # those of k lie behind those of q: no rows of either to split
        return qk_norm_forward_op(q, k, *parameters, cos, sin, way, *spec_args(spec), stats)
    return qk_kernels().qk_norm_forward(q, k, parameters, cos, sin, spec, stats, way, plan)


def qk_launch_key(of_q: tuple | None, of_k: tuple | None, q, k, cos=None, sin=None) -> tuple | None:
    """As `launch_key`, of what `fused_qk_norm` is given.

    Args:
        of_q, of_k: the keys of the norms alone, of tensors of which q and k are views.
    """
    if of_q is None or of_k is None:
        return None
    if cos is None or sin is None:
        return of_q, of_k, q.shape, q.stride(), k.shape, k.stride(), cos is sin
    if type(cos) not in DIRECT_TYPES or type(sin) not in DIRECT_TYPES:
        return None
    if (cos.requires_grad or sin.requires_grad) and torch.is_grad_enabled():
        return None
    tables = cos.shape, cos.stride(), cos.dtype, cos.device, sin.shape, sin.stride(), sin.dtype, sin.device
    return of_q, of_k, q.shape, q.stride(), k.shape, k.stride(), tables


def qk_plan_of(q, k, weights: tuple, spec: NormSpec, cos=None, way: str = ""):
    """The launch on plain tensors that `qk_norm_backend` gives to Triton."""
    return qk_kernels().forward_plan(q, k, weights, cos, spec, way)


def fused_qk_norm(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    spec: NormSpec,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    q_bias: torch.Tensor | None = None,
    k_bias: torch.Tensor | None = None,
    way: str = "",
    backend: str | None = None,
    plan=None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise the heads of q and of k, then turn them by the rotary embedding if cos and sin are given.

    The norm is `spec` on both; the rotary embedding is `apply_rotary_pos_emb` of the Llama family
    (Su et al. 2021), each of its operators rounded.

    Args:
        q: (batch, heads, length, head_dim), and k: (batch, key heads, length, head_dim), of any strides: transposed
            views and slices of a packed projection are read in place.
        q_weight, k_weight, q_bias, k_bias: None as the spec says, or (head_dim,); or (heads, head_dim), where each head
            has its own; or (heads * head_dim,), where one norm spans all heads of a token. They may have another dtype
            than q and k, and so may cos and sin, as under autocast: what is computed is promoted as in plain torch.
        cos, sin: (batch or 1, length, head_dim); or fewer, even columns: the columns behind them pass.
        way: how the rotation is computed, where not every operator rounds and the two halves of the columns turn with
            each other: words of `reference.rotated`.
        backend: what `qk_norm_backend` answered, if the caller has asked already.
        plan: what `qk_plan_of` answered for such tensors.

    Returns:
        (q', k') in the dtypes and strides that the same operators in plain torch give.
    """
    if way and _is_compiling():  # the operator's own backward knows no other way
        normed = fused_qk_norm(q, k, q_weight, k_weight, spec, None, None, q_bias, k_bias)
        return tuple(rotated(y, cos, sin, way=way) for y in normed)
    if plan is None:
        if backend is None:
            backend = qk_norm_backend(q, k, q_weight, k_weight, spec, cos, sin, q_bias, k_bias)
        if backend != "triton" or (not _is_compiling() and under_transform()):
            one = reference_norm if backend != "original" else fused_norm
            sides = (q, q_weight, q_bias), (k, k_weight, k_bias)
            normed = (by_heads(one(as_normed(x, weight), weight, bias, spec), x, weight) for x, weight, bias in sides)
            return tuple(y if cos is None else rotated(y, cos, sin, way=way) for y in normed)
    parameters = q_weight, k_weight, q_bias, k_bias
    try:
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, k, *parameters)):
            if _is_compiling():  # as in `fused_norm`
                return _launch_forward(q, k, parameters, cos, sin, spec, True, way)[:2]
            return _FusedQKNorm.apply(q, k, *parameters, cos, sin, spec, way, plan)
        return _launch_forward(q, k, parameters, cos, sin, spec, False, way, plan)[:2]
    except KernelUnavailable as error:
        give_up(error, q.device)
    return reference_qk_norm(q, k, q_weight, k_weight, spec, cos, sin, q_bias, k_bias, way)


def qk_norm_backend(q, k, q_weight, k_weight, spec: NormSpec, cos=None, sin=None, q_bias=None, k_bias=None) -> str:
    """What serves `fused_qk_norm` with these: as `resolve_backend`, and ``"original"`` for what one launch cannot do.

    Raises:
        RuntimeError: as `resolve_backend`.
    """
    if not qk_fits(q, k, (q_weight, k_weight, q_bias, k_bias), spec, cos, sin):
        return "original"
    # Under autocast these have operators of torch that compute in float32.
    if spec.functional and autocast_enabled(q.device.type):
        return "original"
    if cos is not None and torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        return "original"
    return resolve_backend(as_normed(q, q_weight), q_weight, q_bias, spec)

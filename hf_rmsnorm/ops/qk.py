"""The norms of queries and keys in one launch, with the rotary embedding that follows them where there is one."""

from functools import partial

import torch

from ..formula import NormSpec
from ..kernels.failure import KernelUnavailable
from ..reference import as_normed, by_heads, reference_norm, reference_qk_backward, reference_qk_norm, rotated
from .backend import give_up, resolve_backend, why_not_qk
from .direct import autocast_enabled, is_direct, starts_kernels, under_transform
from .gradients import differentiable, seen_through
from .launches import MISSING, Launches, is_aligned, key_of, launches_of
from .loading import qk_kernels
from .norm import fused_norm

_is_compiling = torch.compiler.is_compiling


class _QKFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, *operands):
        launches, launch, way = call
        yq, yk, rstd, mean = launch.launch(*operands)
        ctx.save_for_backward(*operands, rstd, mean)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return yq, yk

    @staticmethod
    def backward(ctx, dq, dk):
        if dq is None and dk is None:
            return (None,) * 9
        launches, launch, way = ctx.call
        saved = launch.as_saved(ctx.saved_tensors, dq, dk)
        need = tuple(n and d is not None for n, d in zip(ctx.needs_input_grad[1:7], (dq, dk) * 3, strict=True))
        return None, *_gradients(launches, saved, dq, dk, need, way), None, None


def _gradients(launches: Launches, saved: tuple, dq, dk, need: tuple, way: str) -> tuple:
    """The gradients of q, k, their weights and their biases; saved: these, cos, sin, rstd, mean."""
    q, k, *parameters, cos, sin, rstd, mean = saved
    # The kernels take back no pairs, and round every operator where the tables have the dtype of q.
    if "pairs" in way or ("once" in way and cos.dtype == q.dtype):
        dq, dk = (d if d is None else rotated(d, cos, sin, True, way) for d in (dq, dk))
        cos = sin = None
    operands = q, k, *parameters, cos, sin
    spec = launches.spec
    if not (_is_compiling() or seen_through(dq, dk)) and is_direct(*operands, dq, dk):
        try:
            return _launched(launches, (*operands, rstd, mean), dq, dk, need)
        except KernelUnavailable as error:
            give_up(error, q.device)
    if not torch.is_grad_enabled():
        return reference_qk_backward(dq, dk, *operands, spec, need)

    def formula(q, k, q_weight, k_weight, *biases):  # create_graph
        made = reference_qk_norm(q, k, q_weight, k_weight, spec, cos, sin, *biases)
        return [y if dy is None else y.to(dy.dtype) for y, dy in zip(made, (dq, dk), strict=True)]

    return tuple(differentiable(formula, operands[:6], (dq, dk), need))


def _launched(launches: Launches, saved: tuple, dq, dk, need: tuple) -> tuple:
    q, k, q_weight, k_weight, q_bias, k_bias, cos, sin, rstd, mean = saved
    dq, dk = (torch.zeros_like(x) if d is None else d for d, x in ((dq, q), (dk, k)))
    dq, dk = (d if d.stride(-1) == 1 else d.contiguous() for d in (dq, dk))
    read, kept = (dq, dk, q, k, q_weight, k_weight, cos, sin), (q_bias, k_bias, rstd, mean)
    key = key_of(("queries and keys, backward", need), read, kept)
    launch = launches.kept.get(key)
    if launch is None:
        make = qk_kernels().QKBackward
        launch = launches.keep(key, make(launches.spec, (*read, *kept), is_aligned(key), need))
    return launch.launch(*read, *kept)


def run_qk(launches: Launches, operands: tuple, way: str = "") -> tuple | None:
    """(q', k') by a kernel that is started directly; None where none serves such tensors, or operators are to be seen.

    Args:
        operands: q, k, their weights and biases, cos and sin, as `fused_qk_norm` takes them.
    """
    q, cos, sin = operands[0], *operands[-2:]
    if not starts_kernels(q):
        return None
    if launches.spec.functional and autocast_enabled(q.device.type):
        return None  # these have operators of torch that compute in float32 there
    graded = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands)
    if graded and cos is not None and (cos.requires_grad or sin.requires_grad):
        return None
    key = key_of(("queries and keys", graded, way), operands)
    launch = None if key is None else launches.kept.get(key, MISSING)
    try:
        if launch is MISSING:
            launch = launches.keep(key, _made(launches.spec, operands, is_aligned(key), graded, way))
        if launch is None:
            return None
        if graded:
            return _QKFunction.apply((launches, launch, way), *operands)
        return launch.launch(*operands)[:2]
    except KernelUnavailable as error:
        give_up(error, q.device)
        return None


def _made(spec: NormSpec, operands: tuple, aligned: bool, graded: bool, way: str):
    q, k, *parameters, cos, sin = operands
    if why_not_qk(spec, q, k, tuple(parameters), (cos, sin)) is not None:
        return None
    return qk_kernels().QKForward(spec, operands, aligned, graded, way)


def fused_qk_norm(
    q, k, q_weight, k_weight, spec: NormSpec, *tables, biases: tuple = (None, None), way: str = ""
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise the heads of q and of k, then turn them by the rotary embedding if cos and sin are given.

    The norm is `spec` on both; the rotary embedding is `apply_rotary_pos_emb` of the Llama family
    (Su et al. 2021), each of its operators rounded.

    Args:
        q: (batch, heads, length, head_dim), and k: (batch, key heads, length, head_dim), of any strides: transposed
            views and slices of a packed projection are read in place.
        q_weight, k_weight, biases: None as the spec says, or (head_dim,); or (heads, head_dim), where each head
            has its own; or (heads * head_dim,), where one norm spans all heads of a token. They may have another dtype
            than q and k, and so may cos and sin, as under autocast: what is computed is promoted as in plain torch.
        tables: cos and sin, (batch or 1, length, head_dim); or fewer, even columns: the columns behind them pass.
        way: how the rotation is computed, where not every operator rounds and the two halves of the columns turn with
            each other: words of `reference.rotated`.

    Returns:
        (q', k') in the dtypes and strides that the same operators in plain torch give.
    """
    cos, sin = tables or (None, None)
    operands = q, k, q_weight, k_weight, *biases, cos, sin
    both = None if _is_compiling() else run_qk(launches_of(spec), operands, way)
    if both is not None:
        return both
    sides = (q, q_weight, biases[0]), (k, k_weight, biases[1])
    normed = (by_heads(_alone(as_normed(x, weight), weight, bias, spec), x, weight) for x, weight, bias in sides)
    return tuple(y if cos is None else rotated(y, cos, sin, way=way) for y in normed)


def _alone(x, weight, bias, spec: NormSpec):
    backend = resolve_backend(x, weight, bias, spec)
    plain = backend == "reference" or (not _is_compiling() and under_transform())
    return (reference_norm if plain else partial(fused_norm, backend=backend))(x, weight, bias, spec)

"""The norms of queries and keys in one launch with the rotary embedding that follows
them.
"""

import torch

from ..formula import NormSpec
from ..kernels.failure import KernelUnavailable
from ..reference import reference_qk_norm
from .backend import give_up, why_not_qk
from .direct import is_direct, starts_kernels
from .gradients import gradients_of_all, seen_through
from .launches import MISSING, Launches, is_aligned, key_of
from .loading import qk_kernels

_is_compiling = torch.compiler.is_compiling


class _QKFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, *operands):
        launches, launch, way = call
        yq, yk, rstd = launch.launch(*operands)
        ctx.save_for_backward(*operands, rstd)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return yq, yk

    @staticmethod
    def backward(ctx, dq, dk):
        launches, launch, way = ctx.call
        _, need_q, need_k, need_q_weight, need_k_weight, *_ = ctx.needs_input_grad
        of_q, of_k = dq is not None, dk is not None
        need = (
            need_q and of_q,
            need_k and of_k,
            need_q_weight and of_q,
            need_k_weight and of_k,
        )
        if not any(need):
            return (None,) * 7
        saved = launch.as_saved(ctx.saved_tensors, dq, dk)
        return None, *_gradients(launches, saved, dq, dk, need, way), None, None


def _gradients(
    launches: Launches, saved: tuple, dq, dk, need: tuple, way: str
) -> tuple:
    """The gradients of q, k and their weights; saved: these, cos, sin and rstd."""
    *operands, cos, sin, _ = saved
    visible = _is_compiling() or seen_through(dq, dk)
    if not visible and is_direct(*operands, cos, sin, dq, dk):
        try:
            return _launched(launches, saved, dq, dk, need, way)
        except KernelUnavailable as error:
            give_up(error, saved[0].device)

    def formula(*operands):
        yq, yk = reference_qk_norm(*operands, launches.spec, cos, sin, way)
        return _in_dtype_of(dq, yq), _in_dtype_of(dk, yk)

    return tuple(gradients_of_all(formula, tuple(operands), (dq, dk), need))


def _in_dtype_of(gradient: torch.Tensor | None, y: torch.Tensor) -> torch.Tensor:
    return y if gradient is None else y.to(gradient.dtype)


def _launched(launches: Launches, saved: tuple, dq, dk, need: tuple, way: str) -> tuple:
    kernels = qk_kernels()
    q, k, *others, rstd = saved
    dq = torch.zeros_like(q) if dq is None else kernels.unit_stride(dq)
    dk = torch.zeros_like(k) if dk is None else kernels.unit_stride(dk)
    read = dq, dk, q, k, *others
    key = key_of(("queries and keys, backward", need, way), read, (rstd,))
    launch = launches.kept.get(key)
    if launch is None:
        launch = kernels.QKBackward(
            launches.spec, (*read, rstd), is_aligned(key), need, way
        )
        launches.keep(key, launch)
    return launch.launch(*read, rstd)


def run_qk(launches: Launches, operands: tuple, way: str = "") -> tuple | None:
    """The heads of q and k, normalised and rotated in one launch.

    None where no kernel serves such tensors, or where something has to see the
    operators. They may be transposed views and slices of a packed projection. The
    weights may have another dtype than q and k, and so may cos and sin, as under
    autocast: the results are promoted as in plain torch.

    Args:
        operands: q, k, their weights, cos and sin, as `reference.reference_qk_norm`
            takes them.
        way: how they are rotated, as in `reference.rotated`.

    Returns:
        (q', k') in the dtypes and strides that the same operators in plain torch give,
        or None.
    """
    q, *_, cos, sin = operands
    if not starts_kernels(q):
        return None
    graded = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in operands
    )
    if graded and (cos.requires_grad or sin.requires_grad):
        return None
    key = key_of(("queries and keys", graded, way), operands)
    launch = None if key is None else launches.kept.get(key, MISSING)
    try:
        if launch is MISSING:
            launch = launches.keep(
                key, _made(launches.spec, operands, is_aligned(key), graded, way)
            )
        if launch is None:
            return None
        if graded:
            return _QKFunction.apply((launches, launch, way), *operands)
        yq, yk, _ = launch.launch(*operands)
        return yq, yk
    except KernelUnavailable as error:
        give_up(error, q.device)
        return None


def _made(spec: NormSpec, operands: tuple, aligned: bool, graded: bool, way: str):
    """The launch for such operands, or None where the kernels do not serve them."""
    if why_not_qk(spec, *operands) is not None:
        return None
    return qk_kernels().QKForward(spec, operands, aligned, graded, way)

"""The norms of queries and keys in one launch with the rotary embedding that follows
them.
"""

import math

import torch

from ..reference import reference_qk_norm
from .backend import serves_qk
from .direct import row_major, starts_kernels
from .gradients import gradients_of_all, seen_through
from .launches import Launches, key_of
from .launching import backward_by_kernels, by_kernel, require_unchanged
from .loading import kernels


class _QKFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, *operands):
        launches, launch, way = call
        yq, yk, rstd = launch.launch(*operands)
        ctx.save_for_backward(*operands, rstd)
        ctx.kept = launches, way
        ctx.set_materialize_grads(False)
        return yq, yk

    @staticmethod
    def backward(ctx, dq, dk):
        launches, way = ctx.kept
        _, need_q, need_k, need_q_weight, need_k_weight, *_ = ctx.needs_input_grad
        if dq is None:
            need_q = need_q_weight = False
        if dk is None:
            need_k = need_k_weight = False
        need = need_q, need_k, need_q_weight, need_k_weight
        grads = [None] * 4
        if any(need):
            grads = _gradients(launches, ctx.saved_tensors, dq, dk, need, way)
        return None, *grads, None, None


def _gradients(launches: Launches, saved: tuple, dq, dk, need: tuple, way: str):
    """The gradients of q, k and their weights; saved: these, cos, sin and rstd."""
    q, k, *weights, cos, sin, rstd = saved
    if not seen_through(dq, dk):
        of_q = torch.zeros_like(q) if dq is None else dq
        of_k = torch.zeros_like(k) if dk is None else dk
        operands = of_q, of_k, q, k, *weights, cos, sin, rstd
        kind = "queries and keys, backward", need, way
        grads = backward_by_kernels(launches, kind, operands, _as_read, _backward)
        if grads is not None:
            return grads

    def formula(*operands):
        return reference_qk_norm(*operands, launches.spec, cos, sin, way)

    return gradients_of_all(formula, (q, k, *weights), (dq, dk), need)


def _as_read(kind: tuple, operands: tuple) -> tuple:
    """The operands of a backward, columns of unit stride and the others without gaps."""
    dq, dk, q, k, q_weight, k_weight, cos, sin, rstd = operands
    *_, length, head_dim = dq.shape
    of_weight = (head_dim,)
    of_table = cos.shape[0], length, cos.shape[-1]
    rows = math.prod(dq.shape[:-1]) + math.prod(dk.shape[:-1])
    expected = {
        "q": (q, dq.shape),
        "k": (k, dk.shape),
        "the weight of q": (q_weight, of_weight),
        "the weight of k": (k_weight, of_weight),
        "cos": (cos, of_table),
        "sin": (sin, of_table),
        "rstd": (rstd, (rows,)),
    }
    require_unchanged(dq.device, expected)
    dq, dk, q, k = (t if t.stride(-1) == 1 else t.contiguous() for t in (dq, dk, q, k))
    q_weight, k_weight, rstd = row_major(q_weight, k_weight, rstd)
    if cos.stride(-1) != 1 or cos.stride() != sin.stride():
        cos, sin = row_major(cos, sin)
    return dq, dk, q, k, q_weight, k_weight, cos, sin, rstd


def _backward(launches: Launches, kind: tuple, operands: tuple, aligned: bool):
    _, need, way = kind
    return kernels().QKBackward(launches.spec, operands, aligned, need, way)


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
    asking = [t for t in operands if t is not None and t.requires_grad]
    graded = bool(asking) and torch.is_grad_enabled()
    if graded and (cos.requires_grad or sin.requires_grad):
        return None
    key = key_of(("queries and keys", graded, way), operands)
    apply = _QKFunction.apply if graded else None
    made = by_kernel(launches, key, operands, _forward, (graded, way), apply, way)
    return None if made is None else made[:2]


def _forward(launches: Launches, operands: tuple, aligned: bool, *options):
    if not serves_qk(launches.spec, *operands):
        return None
    return kernels().QKForward(launches.spec, operands, aligned, *options)

"""The norms of queries and keys in one launch with the rotary embedding that follows
them.
"""

from operator import is_

import torch
from torch import is_grad_enabled

from ..formula import HALVES, Rotation
from ..reference import reference_qk_norm
from .backend import serves_qk
from .direct import any_requires_grad, row_major, starts_kernels
from .gradients import gradients_of_all, needs_operators
from .launches import Launches
from .launching import (
    OnCopies,
    by_kernel,
    checkpointed_version,
    require_unchanged,
    saved_tensors,
)
from .loading import kernels


class _QKFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, *operands):
        launches, launch = call
        yq, yk, rstd = launch.launch(operands)
        ctx.save_for_backward(*operands, rstd)
        ctx.kept = launches, launch.way
        ctx.weight = id(operands[2])
        ctx.version = checkpointed_version(operands[0])
        return yq, yk

    @staticmethod
    def backward(ctx, dq, dk):
        launches, way = ctx.kept
        need = ctx.needs_input_grad[1:5]
        saved = saved_tensors(ctx, launches)
        grads = None
        if not needs_operators():
            kind = "queries and keys, backward", need, way
            read = dq, dk, *saved
            grads = by_kernel(launches, kind, read, _make_backward)
        if grads is None:
            grads = _by_formula(launches, saved, (dq, dk), need, way)
        return None, *grads, None, None


def _by_formula(launches: Launches, saved: tuple, gradients: tuple, need, way):
    q, k, *weights, cos, sin, _ = saved

    def formula(*operands):
        return reference_qk_norm(*operands, launches.spec, cos, sin, way)

    operands = q, k, *weights
    return gradients_of_all(formula, operands, gradients, need)


def _make_backward(launches: Launches, kind: tuple, operands: tuple, aligned: bool):
    _, need, way = kind
    read = _as_read(operands)
    make = kernels().QKBackward
    launch = make(launches.spec, read, aligned, need, way)
    as_they_are = all(map(is_, read, operands))
    if as_they_are:
        return launch
    return OnCopies(launch, _as_read)


def _as_read(operands: tuple) -> tuple:
    """The operands of a backward, columns of unit stride and the others without gaps."""
    dq, dk, q, k, q_weight, k_weight, cos, sin, rstd = operands
    *_, length, head_dim = dq.shape
    of_weight = (head_dim,)
    of_table = cos.shape[0], length, cos.shape[-1]
    row_count = (dq.numel() + dk.numel()) // head_dim
    expected = {
        "q": (q, dq.shape),
        "k": (k, dk.shape),
        "the weight of q": (q_weight, of_weight),
        "the weight of k": (k_weight, of_weight),
        "cos": (cos, of_table),
        "sin": (sin, of_table),
        "rstd": (rstd, (row_count,)),
    }
    require_unchanged(dq.device, expected)
    rows = [dq, dk, q, k]
    for at, t in enumerate(rows):
        if t.stride(-1) != 1:
            rows[at] = t.contiguous()
    q_weight, k_weight, rstd = row_major(q_weight, k_weight, rstd)
    if cos.stride(-1) != 1 or cos.stride() != sin.stride():
        cos, sin = row_major(cos, sin)
    return *rows, q_weight, k_weight, cos, sin, rstd


def run_qk(launches: Launches, operands: tuple, way: Rotation = HALVES) -> tuple | None:
    """The heads of q and k, normalised and rotated in one launch.

    None where no kernel serves such tensors, or where something has to see the
    operators. They may be transposed views and slices of a packed projection. The
    weights may have another dtype than q and k, and so may cos and sin, as under
    autocast: the results are promoted as in plain torch.

    Args:
        operands: q, k, their weights, cos and sin, as `reference.reference_qk_norm`
            takes them.
        way: how they are rotated: halves, as `Rotation.turns_halves` says.

    Returns:
        (q', k') in the dtypes and strides that the same operators in plain torch give,
        or None.
    """
    q, *_, cos, sin = operands
    if not starts_kernels():
        return None
    graded = is_grad_enabled() and any_requires_grad(operands)
    if graded and any_requires_grad((cos, sin)):
        return None
    kind = "queries and keys", graded, way
    apply = _QKFunction.apply if graded else None
    made = by_kernel(launches, kind, operands, _make_forward, apply)
    if made is None:
        return None
    return made[:2]


def _make_forward(launches: Launches, kind: tuple, operands: tuple, aligned: bool):
    if not serves_qk(launches.spec, *operands):
        return None
    _, stats, way = kind
    return kernels().QKForward(launches.spec, operands, aligned, stats, way)

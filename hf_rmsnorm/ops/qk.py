"""The rotary embedding of queries and keys in one launch, with the norms in front of it
or without any.
"""

import torch
from torch import is_grad_enabled

from ..formula import HALVES, Rotation, dtype_of
from ..kernels.operands import Kind, Launch, any_requires_grad, of_rotation, row_major
from ..kernels.rows import strided_without_data, without_data
from ..reference import reference_qk_norm, rotated
from .autograd import (
    gradients_of_all,
    made_for,
    needs_operators,
    require_unchanged,
    saved_tensors,
    unwatched,
)
from .backend import starts_kernels
from .launches import Launches, by_kernel, kernels
from .limits import serves_qk, why_not_rotated

_rotations = Launches(None)


class _QKFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, *operands):
        launches, launch = call
        q, k, q_weight, k_weight, cos, sin = operands
        yq, yk, rstd = launch.on(operands)
        ctx.save_for_backward(*operands, rstd)
        ctx.kept = launches, launch.way
        ctx.weight = id(q_weight)
        ctx.unwatched = unwatched(q)
        return yq, yk

    @staticmethod
    def backward(ctx, dq, dk):
        launches, way = ctx.kept
        need = ctx.needs_input_grad[1:5]
        saved = saved_tensors(ctx, launches)
        grads = None
        if not needs_operators():
            kind = Kind(_make_backward, (need, way))
            grads = by_kernel(launches, kind, (dq, dk, *saved))
        if grads is None:
            grads = _by_formula(launches, saved, (dq, dk), need, way)
        return None, *grads, None, None


def _by_formula(launches: Launches, saved: tuple, gradients: tuple, need, way):
    q, k, *weights, cos, sin, _ = saved

    def formula(*operands):
        return reference_qk_norm(*operands, launches.spec, cos, sin, way)

    operands = q, k, *weights
    return gradients_of_all(formula, operands, gradients, need)


def _make_backward(
    launches: Launches, operands: tuple, aligned: bool, need: tuple, way: Rotation
) -> Launch:
    def make(read: tuple) -> Launch:
        return kernels().QKBackward(launches.spec, read, aligned, need, way)

    return made_for(operands, _as_read, make)


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


class _RotaryFunction(torch.autograd.Function):
    """Keeps cos and sin alone for its backward: a rotation is linear in q and k."""

    @staticmethod
    def forward(ctx, call, *operands):
        launches, ctx.launch = call
        q, k, q_weight, k_weight, cos, sin = operands
        ctx.save_for_backward(cos, sin)
        yq, yk, _ = ctx.launch.on(operands)
        return yq, yk

    @staticmethod
    def backward(ctx, dq, dk):
        tables = ctx.saved_tensors
        made = None
        if not needs_operators():
            kind = Kind(_make_rotary_backward, (ctx.launch,))
            made = by_kernel(_rotations, kind, of_rotation(dq, dk, *tables))
        if made is None:
            made = _rotated_back(ctx.launch, (dq, dk), tables)
        dxq, dxk, *_ = made
        return None, dxq, dxk, None, None, None, None


def _rotated_back(launch, gradients: tuple, tables: tuple) -> list:
    cos, sin = tables

    def formula(*tensors):
        return [rotated(x, cos, sin, launch.way) for x in tensors]

    # At any q and k, as it is linear; not made like the gradients, which may be batched.
    inputs = []
    for x in launch.inputs:
        zeros = torch.zeros(x.shape, dtype=x.dtype, device=cos.device)
        inputs.append(zeros.requires_grad_())
    return gradients_of_all(formula, inputs, gradients, (True, True))


def _make_rotary_backward(
    launches: Launches, operands: tuple, aligned: bool, forward
) -> Launch | None:
    dq, dk, q_weight, k_weight, *tables = operands
    way = forward.way
    if why_not_rotated(dq, dk, *tables, way):
        return None
    return kernels().QKForward(operands, forward.inputs, aligned, way, back=True)


def run_qk(launches: Launches, operands: tuple, way: Rotation = HALVES) -> tuple | None:
    """The heads of q and k, normalised and rotated in one launch.

    None where no kernel serves such tensors, or where something has to see the
    operators. They may be transposed views and slices of a packed projection. The
    weights may have another dtype than q and k, and so may cos and sin, as under
    autocast: the results are promoted as in plain torch.

    Args:
        operands: `HeadOperands`.
        way: how they are rotated; with norms halves, as `Rotation.turns_halves` says.

    Returns:
        (q', k') in the dtypes and strides that the same operators in plain torch give,
        or None.
    """
    if not starts_kernels():
        return None
    if is_grad_enabled() and any_requires_grad(operands):
        q, k, q_weight, k_weight, cos, sin = operands
        if any_requires_grad((cos, sin)):
            return None
        function = _RotaryFunction if launches.spec is None else _QKFunction
        kind = Kind(_make_forward, (way, True))
        return by_kernel(launches, kind, operands, function.apply)
    made = by_kernel(launches, Kind(_make_forward, (way, False)), operands)
    if made is None:
        return None
    yq, yk, _ = made
    return yq, yk


def run_rotary(operands: tuple, way: Rotation) -> tuple | None:
    """q and k, rotated in one launch: `run_qk` without norms.

    Args:
        operands: q, k, cos and sin, as `reference.rotated` takes them.
    """
    return run_qk(_rotations, of_rotation(*operands), way)


def _make_forward(
    launches: Launches, operands: tuple, aligned: bool, way: Rotation, graded: bool
) -> Launch | None:
    spec = launches.spec
    if not serves_qk(spec, operands, way):
        return None
    q, k, weight, _, *tables = operands
    cos, sin = map(strided_without_data, tables)
    results = []
    for x in (q, k):
        normed = strided_without_data(x)
        if spec is not None:
            dtype = spec.output_dtype(x.dtype, dtype_of(weight))
            normed = without_data(x, dtype)
        results.append(rotated(normed, cos, sin, way))
    stats = graded and spec is not None
    return kernels().QKForward(operands, results, aligned, way, spec, stats)

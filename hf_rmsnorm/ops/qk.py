"""The rotary embedding of queries and keys in one launch, with the norms in front of it
or without any.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, is_grad_enabled

from ..formula import Rotation, dtype_of
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


@dataclass(eq=False)
class Rotary:
    """A model's rotary function, and the formula that it was shown to compute.

    Args:
        way: the formula.
        function: the model's, as ``function(q, k, cos, sin)`` on operands as
            `reference.rotated` takes them.
        transposed: the model gives it q and k of (batch, length, heads, head_dim).
    """

    way: Rotation
    function: Callable
    transposed: bool = False


class _QKFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, *operands):
        launches, launch = call
        q, k, q_weight, k_weight, cos, sin = operands
        yq, yk, rstd = launch.on(operands)
        _, of_q, of_k, of_q_weight, of_k_weight, _, _ = ctx.needs_input_grad
        _ask(ctx, (yq, yk), (of_q or of_q_weight, of_k or of_k_weight))
        ctx.save_for_backward(*operands, rstd)
        ctx.kept = launches, launch.way
        ctx.weight = id(q_weight)
        ctx.unwatched = unwatched(q)
        return yq, yk

    @staticmethod
    def backward(ctx, dq, dk):
        if dq is None and dk is None:
            return (None,) * 7
        launches, way = ctx.kept
        need = ctx.needs_input_grad[1:5]
        saved = saved_tensors(ctx, launches)
        gradients = dq, dk
        alone = _alone(dq, dk)
        if alone is not None:
            gradients, saved, need = _of_side(alone, gradients, saved, need)
        grads = None
        if not needs_operators():
            kind = Kind(_make_backward, (need, way))
            grads = by_kernel(launches, kind, (*gradients, *saved))
        if grads is None:
            grads = _by_formula(launches, saved, gradients, need, way)
        if alone == 1:
            dx, _, dweight, _ = grads
            grads = None, dx, None, dweight
        return None, *grads, None, None


def _ask(ctx, results: tuple, asking: tuple[bool, bool]) -> None:
    """Have each result ask for gradients where the model's own does: where q is trained
    and k is frozen, k does not. A backward then gets None for it.
    """
    ctx.set_materialize_grads(False)
    frozen = [y for y, asks in zip(results, asking, strict=True) if not asks]
    if frozen:
        ctx.mark_non_differentiable(*frozen)


def _alone(dq: Tensor | None, dk: Tensor | None) -> int | None:
    """0 where q alone has a gradient, 1 where k has, None where both have."""
    if dk is None:
        return 0
    return 1 if dq is None else None


def _of_side(alone: int, gradients: tuple, saved: tuple, need: tuple) -> tuple:
    """(gradients, saved tensors, need) of one side: it takes the place of q, and k has
    no heads.
    """
    q, k, q_weight, k_weight, cos, sin, rstd = saved
    dy = gradients[alone]
    x = (q, k)[alone]
    weight = (q_weight, k_weight)[alone]
    rows = dy.numel() // dy.shape[-1]
    rstd = rstd[-rows:] if alone else rstd[:rows]
    no_heads = dy[:, :0]
    saved = x, no_heads.to(x.dtype), weight, weight, cos, sin, rstd
    return (dy, no_heads), saved, (need[alone], False, need[2 + alone], False)


def _by_formula(launches: Launches, saved: tuple, gradients: tuple, need, way):
    q, k, q_weight, k_weight, cos, sin, rstd = saved

    def formula(*operands):
        return reference_qk_norm(*operands, launches.spec, cos, sin, way)

    operands = q, k, q_weight, k_weight
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
        _, ctx.launch = call
        q, k, q_weight, k_weight, cos, sin = operands
        ctx.save_for_backward(cos, sin)
        yq, yk, _ = ctx.launch.on(operands)
        _, of_q, of_k, _, _, _, _ = ctx.needs_input_grad
        _ask(ctx, (yq, yk), (of_q, of_k))
        return yq, yk

    @staticmethod
    def backward(ctx, dq, dk):
        if dq is None and dk is None:
            return (None,) * 7
        cos, sin = ctx.saved_tensors
        alone = _alone(dq, dk)
        if alone is not None:
            dy = (dq, dk)[alone]
            dq, dk = dy, dy[:, :0]
        made = None
        if not needs_operators():
            kind = Kind(_make_rotary_backward, (ctx.launch, alone))
            made = by_kernel(_rotations, kind, of_rotation(dq, dk, cos, sin))
        if made is None:
            inputs = _inputs(ctx.launch, alone)
            made = _rotated_back(inputs, (dq, dk), cos, sin, ctx.launch.way)
        dxq, dxk, *_ = made
        if alone == 0:
            dxk = None
        elif alone == 1:
            dxq, dxk = None, dxq
        return None, dxq, dxk, None, None, None, None


def _inputs(forward: Launch, alone: int | None) -> tuple[Tensor, Tensor]:
    """What a backward gives the gradients of, on meta."""
    if alone is None:
        return forward.inputs
    x = forward.inputs[alone]
    return x, x[:, :0]


def _rotated_back(inputs: tuple, gradients: tuple, cos, sin, way: Rotation) -> list:
    def formula(*tensors):
        return [rotated(x, cos, sin, way) for x in tensors]

    # At any q and k, as it is linear; not made like the gradients, which may be batched.
    zeros = []
    for x in inputs:
        zero = torch.zeros(x.shape, dtype=x.dtype, device=cos.device)
        zeros.append(zero.requires_grad_())
    return gradients_of_all(formula, zeros, gradients, (True, True))


def _make_rotary_backward(
    launches: Launches,
    operands: tuple,
    aligned: bool,
    forward: Launch,
    alone: int | None,
) -> Launch | None:
    dq, dk, q_weight, k_weight, cos, sin = operands
    way = forward.way
    if why_not_rotated(dq, dk, cos, sin, way):
        return None
    inputs = _inputs(forward, alone)
    return kernels().QKForward(operands, inputs, aligned, way, back=True)


def run_qk(launches: Launches, operands: tuple, rotary: Rotary) -> tuple | None:
    """The heads of q and k, normalised and rotated in one launch.

    None where no kernel serves such tensors, or where something has to see the
    operators. They may be transposed views and slices of a packed projection. The
    weights may have another dtype than q and k, and so may cos and sin, as under
    autocast: the results are promoted as in plain torch.

    Args:
        operands: `HeadOperands`.
        rotary: how they are rotated; with norms halves, as `Rotation.turns_halves` says.

    Returns:
        (q', k') in the dtypes and strides that the same operators in plain torch give,
        or None.
    """
    if not starts_kernels():
        return None
    if is_grad_enabled() and any_requires_grad(operands):
        *others, cos, sin = operands
        if any_requires_grad((cos, sin)):
            return None
        function = _RotaryFunction if launches.spec is None else _QKFunction
        kind = Kind(_make_forward, (rotary, True))
        return by_kernel(launches, kind, operands, function.apply)
    made = by_kernel(launches, Kind(_make_forward, (rotary, False)), operands)
    if made is None:
        return None
    yq, yk, _ = made
    return yq, yk


def run_rotary(operands: tuple, rotary: Rotary) -> tuple | None:
    """q and k, rotated in one launch: `run_qk` without norms.

    Args:
        operands: q, k, cos and sin, as `reference.rotated` takes them.
    """
    return run_qk(_rotations, of_rotation(*operands), rotary)


def _make_forward(
    launches: Launches, operands: tuple, aligned: bool, rotary: Rotary, graded: bool
) -> Launch | None:
    spec = launches.spec
    way = rotary.way
    if not serves_qk(spec, operands, way):
        return None
    q, k, q_weight, k_weight, cos, sin = operands
    normed = []
    for x in (q, k):
        if spec is None:
            normed.append(strided_without_data(x))
        else:
            dtype = spec.output_dtype(x.dtype, dtype_of(q_weight))
            normed.append(without_data(x, dtype))
    # which gives them the strides that the model's own results have
    tables = map(strided_without_data, (cos, sin))
    results = rotary.function(*normed, *tables)
    stats = graded and spec is not None
    return kernels().QKForward(operands, results, aligned, way, spec, stats)

"""The rotary embedding of queries and keys in one launch, with the norms in front of it
or without any.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, is_grad_enabled
from torch.linalg import vector_norm

from ..formula import Rotation, dtype_of
from ..operands import (
    Family,
    Kind,
    Launch,
    any_requires_grad,
    of_rotation,
    row_major,
)
from ..reference import reference_norm, reference_qk_norm, rotated
from ..rows import strided_without_data, without_data
from .autograd import (
    FLOOR,
    gradients_of_all,
    largest,
    made_for,
    needs_operators,
    require_unchanged,
    saved_tensors,
    unwatched,
)
from .backend import device_refusal, starts_kernels
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
            kind = Kind(HEAD_GRADIENTS, (need, way))
            grads = by_kernel(launches, kind, (dq, dk, *saved))
        if grads is None:
            grads = _by_formula(launches, saved, (dq, dk), need, way)
        return None, *grads, None, None


def _by_formula(launches: Launches, saved: tuple, gradients: tuple, need, way):
    q, k, q_weight, k_weight, cos, sin, rstd = saved

    def formula(*operands):
        return reference_qk_norm(*operands, launches.spec, cos, sin, way)

    operands = q, k, q_weight, k_weight
    return gradients_of_all(formula, operands, gradients, need)


def _make_backward(
    launches: Launches, operands: tuple, aligned: bool, need: tuple, way: Rotation
) -> Launch | None:
    device = operands[0].device
    if device_refusal(device.type, device.index) is not None:
        return None

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
        rotations, ctx.launch = call
        q, k, q_weight, k_weight, cos, sin = operands
        ctx.save_for_backward(cos, sin)
        yq, yk, rstd = ctx.launch.on(operands)
        return yq, yk

    @staticmethod
    def backward(ctx, dq, dk):
        cos, sin = ctx.saved_tensors
        made = None
        if not needs_operators():
            kind = Kind(ROTATION_BACK, (ctx.launch,))
            made = by_kernel(_rotations, kind, of_rotation(dq, dk, cos, sin))
        if made is None:
            made = _rotated_back(ctx.launch, (dq, dk), cos, sin)
        dxq, dxk, *_ = made
        return None, dxq, dxk, None, None, None, None


def _rotated_back(forward: Launch, gradients: tuple, cos, sin) -> list:
    def formula(*tensors):
        return [rotated(x, cos, sin, forward.way) for x in tensors]

    # At any q and k, as it is linear; not made like the gradients, which may be batched.
    inputs = []
    for x in forward.inputs:
        dtype = cos.dtype if cos.dtype == torch.float64 else x.dtype
        zeros = torch.zeros(x.shape, dtype=dtype, device=cos.device)
        inputs.append(zeros.requires_grad_())
    return gradients_of_all(formula, inputs, gradients, (True, True))


def _make_rotary_backward(
    launches: Launches, operands: tuple, aligned: bool, forward: Launch
) -> Launch | None:
    dq, dk, q_weight, k_weight, cos, sin = operands
    way = forward.way
    if why_not_rotated(dq, dk, cos, sin, way):
        return None
    return kernels().QKForward(operands, forward.inputs, aligned, way, back=True)


def run_qk(
    launches: Launches,
    operands: tuple,
    rotary: Rotary,
    norm: Callable | None = None,
) -> tuple | None:
    """The heads of q and k, normalised and rotated in one launch.

    None where no kernel serves such tensors, or where something has to see the
    operators. They may be transposed views and slices of a packed projection. The
    weights may have another dtype than q and k, and so may cos and sin, as under
    autocast: the results are promoted as in plain torch.

    Args:
        operands: `HeadOperands`.
        rotary: how they are rotated; with norms halves, as `Rotation.turns_halves` says.
        norm: the code that is replaced, ``norm(0, q)`` and ``norm(1, k)``; None where
            that is the formula in plain torch.

    Returns:
        (q', k') in the dtypes and strides that the same operators in plain torch give,
        or None.
    """
    if not starts_kernels():
        return None
    own = _one_by_one, launches.spec, operands, rotary, norm
    if not (is_grad_enabled() and any_requires_grad(operands)):
        made = by_kernel(launches, Kind(HEADS, (rotary, False)), operands, None, own)
        if made is None:
            return None
        yq, yk, rstd = made
        return yq, yk
    q, k, q_weight, k_weight, cos, sin = operands
    if any_requires_grad((cos, sin)):
        return None
    of_q = any_requires_grad((q, q_weight))
    if of_q != any_requires_grad((k, k_weight)) and k.numel():
        return _run_apart(launches, operands, rotary, norm)
    function = _RotaryFunction if launches.spec is None else _QKFunction
    kind = Kind(HEADS, (rotary, True))
    return by_kernel(launches, kind, operands, function.apply, own)


def _run_apart(
    launches: Launches, operands: tuple, rotary: Rotary, norm: Callable | None
) -> tuple | None:
    """q and k in a launch each, as one of them is frozen: it must not ask for gradients."""
    if not serves_qk(launches.spec, operands, rotary.way):
        return None  # each alone may be served, as where they differ in dtype
    q, k, q_weight, k_weight, cos, sin = operands
    results = []
    for at, (x, weight) in enumerate(((q, q_weight), (k, k_weight))):
        no_heads = x.detach()[:, :0]
        one = x, no_heads, weight, weight, cos, sin
        alone = None if norm is None else partial(_of_one, norm, at)
        made = run_qk(launches, one, rotary, alone)
        if made is None:
            return None
        y, nothing = made
        results.append(y)
    return tuple(results)


def _of_one(norm: Callable, at: int, _, x: Tensor) -> Tensor:
    return norm(at, x)


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


# What launches are compared with


def _one_by_one(spec, operands: tuple, rotary: Rotary, norm=None) -> tuple:
    """The code that a launch replaces: norms, and then the model's function."""
    q, k, q_weight, k_weight, cos, sin = operands
    if norm is not None:
        q = norm(0, q)
        k = norm(1, k)
    elif spec is not None:
        q = reference_norm(q, q_weight, None, spec)
        k = reference_norm(k, k_weight, None, spec)
    return rotary.function(q, k, cos, sin)


def _plain_heads(launches: Launches, how: tuple, operands: tuple) -> tuple:
    rotary, graded = how
    return _one_by_one(launches.spec, operands, rotary)


def _exact_heads(launches: Launches, how: tuple, operands: tuple) -> tuple:
    q, k, q_weight, k_weight, cos, sin = operands
    rotary, graded = how
    heads, weight = _joined(q, k, q_weight, k_weight)
    y = _rotated_heads(launches, heads, weight, cos, sin, rotary.way)
    return (y,), (2 * FLOOR * largest(y, -1),)


def _joined_heads(results: tuple) -> tuple:
    yq, yk, *_ = results
    return (torch.cat((yq, yk), 1),)


def _joined(q, k, q_weight, k_weight) -> tuple:
    """q and k as heads of one tensor, (batch, heads, length, head_dim), and the weight
    of each head, (heads, 1, head_dim).
    """
    heads = torch.cat((q, k), 1)
    weight = None
    if q_weight is not None:
        shapes = [(x.shape[1], 1, x.shape[-1]) for x in (q, k)]
        of_q = q_weight.expand(shapes[0])
        weight = torch.cat((of_q, k_weight.expand(shapes[1])))
    return heads, weight


def _rotated_heads(launches: Launches, heads, weight, cos, sin, way) -> Tensor:
    if launches.spec is not None:
        heads = reference_norm(heads, weight, None, launches.spec)
    return rotated(heads, cos, sin, way)


def _plain_head_gradients(launches: Launches, how: tuple, operands: tuple) -> list:
    dq, dk, *saved = operands
    need, way = how
    return _by_formula(launches, tuple(saved), (dq, dk), need, way)


def _exact_head_gradients(launches: Launches, how: tuple, operands: tuple) -> tuple:
    dq, dk, q, k, q_weight, k_weight, cos, sin, rstd = operands
    need, way = how
    counts = q.shape[1], k.shape[1]
    heads, weight = _joined(q, k, q_weight, k_weight)
    dy = torch.cat((dq, dk), 1)

    def formula(heads, weight):
        return (_rotated_heads(launches, heads, weight, cos, sin, way),)

    of_each = True, weight is not None
    of_heads, of_weight = gradients_of_all(formula, (heads, weight), (dy,), of_each)
    terms = 2 * FLOOR * largest(dy, -1)
    of_sums = terms.sum()
    if weight is not None:
        terms = terms * (launches.spec.weight_offset + largest(weight))
        of_weight = [part.sum((0, 1)) for part in of_weight.split(counts)]
    width = heads.shape[-1]
    root = vector_norm(heads, dim=-1) + (width * launches.spec.eps) ** 0.5
    terms = terms * width**0.5 / root
    grads = *of_heads.split(counts, 1), *(of_weight or (None, None))
    floors = *terms.split(counts, 1), of_sums, of_sums
    grads = [t if needed else None for t, needed in zip(grads, need, strict=True)]
    return grads, floors


def _plain_rotation_back(launches: Launches, how: tuple, operands: tuple) -> list:
    dq, dk, q_weight, k_weight, cos, sin = operands
    (forward,) = how
    return _rotated_back(forward, (dq, dk), cos, sin)


def _exact_rotation_back(launches: Launches, how: tuple, operands: tuple) -> tuple:
    dq, dk, q_weight, k_weight, cos, sin = operands
    (forward,) = how
    dy = torch.cat((dq, dk), 1)

    def formula(heads):
        return (rotated(heads, cos, sin, forward.way),)

    heads = torch.zeros_like(dy)  # any, as it is linear
    (grad,) = gradients_of_all(formula, (heads,), (dy,), (True,))
    counts = dq.shape[1], dk.shape[1]
    floors = 2 * FLOOR * largest(dy, -1)
    return grad.split(counts, 1), floors.split(counts, 1)


HEADS = Family(
    "rotary embedding",
    _make_forward,
    _plain_heads,
    _exact_heads,
    2,
    joined=_joined_heads,
)
HEAD_GRADIENTS = Family(
    "the gradient of q/k norms and rotary embedding",
    _make_backward,
    _plain_head_gradients,
    _exact_head_gradients,
    4,
    is_back=True,
)
ROTATION_BACK = Family(
    "the gradient of a rotary embedding",
    _make_rotary_backward,
    _plain_rotation_back,
    _exact_rotation_back,
    2,
    is_back=True,
    essential=lambda forward: (forward.way,),
)

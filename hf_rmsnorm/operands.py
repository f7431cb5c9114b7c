"""The operands of launches, each with one name, in the order in which kernels take
them.

Launches take and return plain tuples: to make a named one takes a call longer. The
functions here make them, and the classes name their items.
"""

from typing import Any, NamedTuple

from torch import Tensor

from .formula import OptionalTensor

# The operands of a launch, in the order of one of the classes below; None for those that
# are absent.
Operands = tuple[OptionalTensor, ...]
# Which of their gradients are wanted.
Needed = tuple[bool, ...]
# The code that a launch replaces: a function, and its arguments.
Replaced = tuple[Any, ...]

# What becomes of the scale of a modulation, in the words of the kernels.
ONE_PLUS = "modulate_after"
ALONE = "multiply_after"


class NormOperands(NamedTuple):
    """The operands of a norm's forward.

    Args:
        x: (..., hidden_size) of any strides and at least one row, on a device that
            Triton serves.
        weight, bias: contiguous, (hidden_size,), or (heads, hidden_size) for x of (...,
            heads, hidden_size); or None.
        gate: x's shape, any strides, where the formula has one.
        scale, shift: those of a modulation: x's shape and one layout, or None. Each of
            its operators rounds, and all operands have one dtype.
        multiplier: multiplies x before it is added; as shift.
        residual: x's shape, any strides and dtype: the norm is that of h = residual +
            x. Not with a parameter that has heads, nor with a gate; with a scale both
            are contiguous.
    """

    x: Tensor
    weight: OptionalTensor
    bias: OptionalTensor
    gate: OptionalTensor
    scale: OptionalTensor
    shift: OptionalTensor
    multiplier: OptionalTensor
    residual: OptionalTensor


class NormResults(NamedTuple):
    """The results of a norm's forward.

    Args:
        h: the sum that was normalised; None if no sum is kept.
        y: the norm.
        rstd, mean: (rows,) float32, for the backward, or None; no mean of an RMSNorm.
    """

    h: OptionalTensor
    y: Tensor
    rstd: OptionalTensor
    mean: OptionalTensor


class GradientOperands(NamedTuple):
    """The operands of a norm's backward.

    Args:
        dy: the gradient of y, of any strides.
        x, weight, bias, gate, scale: as in the forward; x is the sum, if there was one.
        dh: another gradient of x, of x's shape and any strides, which is added to dx
            before that is rounded; or None. Not with a gate or a scale.
        rstd, mean: results of the forward.
    """

    dy: Tensor
    x: Tensor
    weight: OptionalTensor
    bias: OptionalTensor
    gate: OptionalTensor
    scale: OptionalTensor
    dh: OptionalTensor
    rstd: Tensor
    mean: OptionalTensor


class HeadOperands(NamedTuple):
    """Queries and keys that are rotated.

    Args:
        q, k: (batch, heads, length, head_dim), columns of unit stride, of one dtype.
        q_weight, k_weight: (head_dim,), contiguous, of one dtype; both None if the
            norms have none, or there are no norms.
        cos, sin: (batch or 1, length, columns), of one dtype and the same strides.
    """

    q: Tensor
    k: Tensor
    q_weight: OptionalTensor
    k_weight: OptionalTensor
    cos: Tensor
    sin: Tensor


def of_norm(x, weight, bias, gate=None) -> Operands:
    """`NormOperands` of a norm alone."""
    return x, weight, bias, gate, None, None, None, None


def of_sum(left, right, weight, bias) -> Operands:
    """`NormOperands` of the norm of ``left + right``."""
    return right, weight, bias, None, None, None, None, left


def of_modulation(
    x, weight, bias, scale, shift=None, multiplier=None, residual=None
) -> Operands:
    """`NormOperands` of a norm with a modulation, and a sum before it."""
    return x, weight, bias, None, scale, shift, multiplier, residual


def of_rotation(q, k, cos, sin) -> Operands:
    """`HeadOperands` without norms."""
    return q, k, None, None, cos, sin


def present(*tensors: OptionalTensor) -> list[Tensor]:
    """The tensors that are there."""
    return [t for t in tensors if t is not None]


def row_major(*tensors: OptionalTensor) -> list[OptionalTensor]:
    """The tensors, those with gaps copied."""
    return [t if t is None else t.contiguous() for t in tensors]


def any_requires_grad(tensors: Operands) -> bool:
    for t in tensors:
        if t is None:
            continue
        if t.requires_grad:
            return True
    return False

"""What launches compute, in plain torch: with this they are compared, and this runs where
no kernel serves a backward.
"""

from collections.abc import Callable

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd.graph import get_gradient_edge

from ..formula import NormSpec, OptionalTensor
from ..operands import ONE_PLUS, Needed, Operands
from ..reference import reference_norm


def one_by_one(
    modulation: str, operands: Operands, normalise: Callable, *before_x
) -> tuple[OptionalTensor, Tensor]:
    """(h, y) of `NormOperands`, one operator after the other; h is None of no sum.

    Args:
        normalise: called as ``normalise(*before_x, x)``.
    """
    x, _, _, _, scale, shift, multiplier, residual = operands
    h = None
    if multiplier is not None:
        x = x * multiplier
    if residual is not None:
        x = h = residual + x
    y = normalise(*before_x, x)
    return h, scaled_and_shifted(y, modulation, scale, shift)


def scaled_and_shifted(y: Tensor, modulation: str, scale, shift=None) -> Tensor:
    """A modulation of y, if there is one."""
    if scale is not None:
        y = y * (1 + scale if modulation == ONE_PLUS else scale)
    if shift is not None:
        y = y + shift
    return y


def autograd_gradients(
    spec: NormSpec, modulation: str, operands: Operands, dy, need: Needed
) -> Operands:
    """The gradients of a norm by autograd; differentiable where gradients are on, as for
    `create_graph`.

    Args:
        operands: x, weight, bias, gate and scale.
        need: which of their gradients are wanted.
    """

    def formula(x, weight, bias, gate, scale):
        y = reference_norm(x, weight, bias, spec, gate)
        return (scaled_and_shifted(y, modulation, scale).to(dy.dtype),)

    return gradients_of_all(formula, operands, (dy,), need)


def gradients_of_all(
    formula: Callable, inputs: Operands, gradients: Operands, need: Needed
) -> Operands:
    """The gradients of ``formula(*inputs)``, several tensors; differentiable where
    gradients are on.
    """
    create_graph = is_grad_enabled()
    operands = []
    leaves = []
    with torch.enable_grad():
        for t, needed in zip(inputs, need, strict=True):
            if t is not None and create_graph:
                # A view, at which `grad` stops: x may itself depend on the weight.
                t = t.view_as(t)
            elif t is not None:
                t = t.detach().requires_grad_(needed)
            operands.append(t)
            if needed:
                leaves.append(t)
        edges = []
        of_edges = []
        for y, dy in zip(formula(*operands), gradients, strict=True):
            if y.requires_grad:  # not of a head whose operands are all frozen
                edges.append(get_gradient_edge(y))  # without the memory of y
                of_edges.append(dy)
        del y
        grads = torch.autograd.grad(
            edges,
            leaves,
            of_edges,
            create_graph=create_graph,
            allow_unused=True,
        )
    of_leaves = iter(grads)
    return tuple(next(of_leaves) if needed else None for needed in need)

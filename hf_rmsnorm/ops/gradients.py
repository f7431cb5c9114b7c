"""The gradients of the fused norms, for eager autograd, `create_graph`, functorch and
compilers.
"""

import math
from collections.abc import Callable
from functools import partial
from operator import is_

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling

from ..formula import NormSpec
from ..kernels.rows import by_row, copied_in_order, heads_of, memory_order
from ..reference import input_of_output, reference_backward
from .backend import why_not
from .direct import operators_are_seen, present, row_major
from .launches import Launches
from .launching import OnCopies, by_kernel, require_unchanged
from .loading import kernels


def needs_operators() -> bool:
    """Whether what runs this backward needs operators it can see through: a compiler,
    another differentiation, functorch, a mode.
    """
    return is_compiling() or is_grad_enabled() or operators_are_seen()


def gradients_of_all(formula: Callable, inputs: tuple, gradients: tuple, need) -> list:
    """The gradients of ``formula(*inputs)``, a tuple; differentiable where gradients
    are on, as for `create_graph`.
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
        outputs = formula(*operands)
        grads = torch.autograd.grad(
            outputs, leaves, gradients, create_graph=create_graph, allow_unused=True
        )
    of_leaves = iter(grads)
    return [next(of_leaves) if needed else None for needed in need]


def norm_gradients(kept: tuple, saved: tuple, dy, dh, need: tuple):
    """(dx, dweight, dbias, dgate) inside a backward, in whatever that runs.

    Args:
        kept: of the forward: its launches; the strides that x had, in whose order rstd
            has a value for each row (hooks of saved tensors may return x with others);
            whether the norm's output was saved in the place of x.
        saved: (x, weight, bias, gate, rstd, mean). rstd is None where plain torch has
            computed it.
        dy: the gradient of the norm.
        dh: another gradient of x, which is added to dx; or None.
        need: whether dx, dweight, dbias and dgate are wanted.

    Raises:
        RuntimeError: an operand has another shape or device than the forward read.
    """
    launches, strides, from_output = kept
    if not need[0]:
        dh = None
    x, weight, bias, gate, rstd, mean = saved
    if gate is not None and dh is not None:  # of a modulation behind a sum
        dx, *others = norm_gradients(kept, saved, dy, None, need)
        return dh + dx, *others
    if rstd is not None and not needs_operators():
        kind = "backward", strides, need, from_output
        read = dy, x, weight, bias, gate, dh, rstd, mean
        grads = by_kernel(launches, kind, read, make_backward)
        if grads is not None:
            return grads
    if from_output:
        x = _input_of(launches.spec, x, weight, bias, rstd)
    return by_formula(launches, (x, weight, bias, gate), dy, dh, need)


def make_backward(launches: Launches, kind: tuple, operands: tuple, aligned: bool):
    """The launch of a backward; None where no kernel serves such operands.

    Args:
        kind: ("backward", strides of x by which its rows are numbered, which gradients
            are needed, whether x is the norm's output).
        operands: (dy, x, weight, bias, gate, dh, rstd, mean).
    """
    _, strides, need, from_output = kind
    prepare = partial(_as_read, strides)
    read = prepare(operands)
    _, x, weight, bias, gate, *_ = read
    spec = launches.spec
    if spec.gate is None:
        gate = None  # the scale of a modulation
    if why_not(spec, x, weight, bias, gate) is not None:
        return None
    make = kernels().NormBackward
    launch = make(spec, read, aligned, need, from_output, launches.modulation)
    as_they_are = all(map(is_, read, operands))
    if as_they_are:
        return launch
    return OnCopies(launch, prepare)


def _as_read(strides: tuple, operands: tuple) -> tuple:
    dy, x, weight, bias, gate, dh, rstd, mean = operands
    shape = dy.shape
    of_stats = (math.prod(shape[:-1]),)
    dimensions = [p.dim() for p in present(weight, bias)]
    of_parameter = shape[-max(dimensions, default=1) :]
    expected = {
        "x": (x, shape),
        "gate": (gate, shape),
        "the gradient of the sum": (dh, shape),
        "weight": (weight, of_parameter),
        "bias": (bias, of_parameter),
        "rstd": (rstd, of_stats),
        "mean": (mean, of_stats),
    }
    require_unchanged(dy.device, expected)
    if x.stride() != strides:
        # an expanded x cannot be copied with its own strides
        x = copied_in_order(x, memory_order(shape, strides))
    weight, bias, rstd, mean = row_major(weight, bias, rstd, mean)
    return dy, x, weight, bias, gate, dh, rstd, mean


def by_formula(launches: Launches, operands, dy, dh, need):
    """The gradients of the plain formula, differentiable where gradients are on: for
    `create_graph`.
    """
    x, weight, bias, gate = operands
    spec = launches.spec
    is_modulated = gate is not None and spec.gate is None
    if is_grad_enabled() or is_modulated:

        def formula(*operands):
            return (launches.in_plain_torch(*operands),)

        grads = gradients_of_all(formula, operands, (dy,), need)
    else:
        grads = reference_backward(dy, x, weight, bias, spec, need, gate)
    if dh is None:
        return grads
    dx, *others = grads
    return dh + dx, *others


def _input_of(spec: NormSpec, y: Tensor, weight, bias, rstd: Tensor) -> Tensor:
    """The input of a norm whose output is saved in its place."""
    if not is_compiling() and is_grad_enabled():
        raise RuntimeError(
            "create_graph=True differentiates a norm twice, for which it needs its input, and it keeps its output "
            "instead: call patch_model(model, memory_efficient=False) first"
        )
    rstd = by_row(rstd, y, spec, heads_of(weight, bias))
    return input_of_output(y, weight, bias, rstd, spec)

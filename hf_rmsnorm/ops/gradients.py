"""The gradients of the fused norms, for eager autograd, `create_graph`, functorch and
compilers.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ..formula import NormSpec
from ..kernels.rows import by_row, heads_of
from ..reference import input_of_output, reference_backward
from .backend import why_not
from .direct import row_major, under_transform
from .launches import Launches
from .launching import backward_by_kernels, require_unchanged
from .loading import kernels

_is_compiling = torch.compiler.is_compiling
_is_batched = torch._C._functorch.is_legacy_batchedtensor


def seen_through(*gradients: torch.Tensor | None) -> bool:
    """Whether what runs this backward needs operators it can see through: a compiler,
    another differentiation, functorch, vmap.
    """
    if _is_compiling() or torch.is_grad_enabled() or under_transform():
        return True
    return any(g is not None and _is_batched(g) for g in gradients)


def gradients_of_all(formula: Callable, inputs: tuple, gradients: tuple, need) -> list:
    """The gradients of ``formula(*inputs)``, a tuple; differentiable where gradients
    are on, as for `create_graph`.
    """
    create_graph = torch.is_grad_enabled()

    def leaf(t, needed):
        if t is None:
            return None
        # A view: where x was itself computed from the same weight, the gradient asked
        # for is the one along this norm alone.
        return t.view_as(t) if create_graph else t.detach().requires_grad_(needed)

    with torch.enable_grad():
        inputs = [leaf(t, needed) for t, needed in zip(inputs, need, strict=True)]
        pairs = zip(formula(*inputs), gradients, strict=True)
        outputs, gradients = zip(*[p for p in pairs if p[1] is not None], strict=True)
        leaves = [t for t, needed in zip(inputs, need, strict=True) if needed]
        grads = torch.autograd.grad(
            outputs, leaves, gradients, create_graph=create_graph, allow_unused=True
        )
    of_leaves = iter(grads)
    return [next(of_leaves) if needed else None for needed in need]


def norm_gradients(kept: tuple, saved: tuple, dy, dh, need: tuple[bool, ...]):
    """(dx, dweight, dbias, dgate) inside a backward, in whatever that runs.

    Args:
        kept: of the forward: its launches, the strides by which the rows that it saved
            are numbered, whether these are the output.
        saved: (x, weight, bias, gate, rstd, mean); the norm's output is in the place of
            x if that was saved. rstd is None where plain torch has computed it.
        dh: another gradient of x, which is in dx; or None.

    Raises:
        RuntimeError: an operand has another shape or device than the forward read.
    """
    launches, strides, from_output = kept
    dh = dh if need[0] else None
    *operands, rstd, mean = saved
    gate = operands[3]
    if gate is not None and dh is not None:  # which no kernel adds behind a gate
        dx, *others = norm_gradients(kept, saved, dy, None, need)
        return dh + dx, *others
    if rstd is not None and not seen_through(dy, dh):
        read = dy, *operands, dh, rstd, mean
        grads = launched_backward(launches, strides, read, need, from_output)
        if grads is not None:
            return grads
    if from_output:
        operands[0] = _input_of(launches.spec, operands, rstd)
    return by_formula(launches, operands, dy, dh, need)


def launched_backward(
    launches: Launches,
    strides: tuple,
    operands: tuple,
    need: tuple[bool, ...],
    from_output: bool = False,
) -> tuple | None:
    """(dx, dweight, dbias, dgate) by the kernels; None where they do not serve such
    operands.

    Args:
        strides: of x, by which its rows are numbered.
        operands: (dy, x, weight, bias, gate, dh, rstd, mean).
    """
    kind = "backward", strides, need, from_output
    return backward_by_kernels(launches, kind, operands, _as_read, _made)


def _as_read(kind: tuple, operands: tuple) -> tuple:
    _, strides, *_ = kind
    dy, x, weight, bias, gate, dh, rstd, mean = operands
    shape, of_stats = dy.shape, (math.prod(dy.shape[:-1]),)
    dimensions = [p.dim() for p in (weight, bias) if p is not None]
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
        empty = torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device)
        x = empty.copy_(x)
    weight, bias, rstd, mean = row_major(weight, bias, rstd, mean)
    return dy, x, weight, bias, gate, dh, rstd, mean


def _made(launches: Launches, kind: tuple, operands: tuple, aligned: bool):
    _, _, need, from_output = kind
    _, x, weight, bias, gate, *_ = operands
    spec = launches.spec
    if why_not(spec, x, weight, bias, gate if spec.gate else None) is not None:
        return None
    return kernels().NormBackward(
        spec, operands, aligned, need, from_output, launches.modulation
    )


def by_formula(launches: Launches, operands, dy, dh, need):
    """The gradients of the plain formula, differentiable where gradients are on: for
    `create_graph`.
    """
    x, weight, bias, gate = operands
    spec = launches.spec
    is_modulated = gate is not None and spec.gate is None
    if torch.is_grad_enabled() or is_modulated:

        def formula(*operands):
            return (launches.in_plain_torch(*operands),)

        grads = gradients_of_all(formula, tuple(operands), (dy,), need)
    else:
        grads = reference_backward(dy, x, weight, bias, spec, need, gate)
    return grads if dh is None else (dh + grads[0], *grads[1:])


def _input_of(spec: NormSpec, operands: list, rstd: torch.Tensor) -> torch.Tensor:
    """The input of a norm whose output is saved in its place."""
    if not _is_compiling() and torch.is_grad_enabled():
        raise RuntimeError(
            "create_graph=True differentiates a norm twice, for which it needs its input, and it keeps its output "
            "instead: call patch_model(model, memory_efficient=False) first"
        )
    y, weight, bias, _ = operands
    rstd = by_row(rstd, y, spec, heads_of(weight, bias))
    return input_of_output(y, weight, bias, rstd, spec)

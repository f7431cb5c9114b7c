"""The gradients of the fused norms, for eager autograd, `create_graph`, functorch and
compilers.
"""

from collections.abc import Callable

import torch

from ..formula import NormSpec
from ..kernels.failure import KernelUnavailable
from ..kernels.saved import as_saved
from ..reference import input_of_output, reference_backward, reference_norm
from .backend import give_up
from .direct import is_direct, under_transform
from .launches import is_aligned, key_of
from .loading import backward_kernels
from .operators import by_operator, register_gradients

_is_compiling = torch.compiler.is_compiling
_is_batched = torch._C._functorch.is_legacy_batchedtensor


def seen_through(*gradients: torch.Tensor | None) -> bool:
    """Whether what runs this backward needs operators it can see through: another
    differentiation, functorch, vmap.
    """
    if torch.is_grad_enabled() or under_transform():
        return True
    return any(g is not None and _is_batched(g) for g in gradients)


def gradients_of_all(formula: Callable, inputs: tuple, gradients: tuple, need) -> list:
    """The gradients of ``formula(*inputs)``, a tuple; differentiable where gradients
    are on, as for `create_graph`.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        if create_graph:
            # Views: where x was itself computed from the same weight, the gradient
            # asked for is the one along this norm alone.
            inputs = [t if t is None else t.view_as(t) for t in inputs]
        else:
            pairs = zip(inputs, need, strict=True)
            inputs = [
                t if t is None else t.detach().requires_grad_(needed)
                for t, needed in pairs
            ]
        pairs = [
            (y, d)
            for y, d in zip(formula(*inputs), gradients, strict=True)
            if d is not None
        ]
        outputs, gradients = zip(*pairs, strict=True)
        leaves = [t for t, needed in zip(inputs, need, strict=True) if needed]
        grads = torch.autograd.grad(
            outputs, leaves, gradients, create_graph=create_graph, allow_unused=True
        )
    of_leaves = iter(grads)
    return [next(of_leaves) if needed else None for needed in need]


def norm_gradients(
    kept: tuple,
    saved: tuple,
    dy,
    dh,
    need: tuple[bool, ...],
    formula: Callable | None = None,
):
    """(dx, dweight, dbias, dgate) inside a backward, in whatever that runs.

    Args:
        kept: of the forward (its launches, its launch, the strides by which the rows
            that it saved are numbered, whether these are the output).
        saved: (x, weight, bias, gate, rstd, mean); the norm's output is in the place of
            x if that was saved.
        dh: another gradient of x, which is in dx; or None.
        formula: computes the output from x, weight, bias and gate in plain torch; None:
            the spec does.

    Raises:
        RuntimeError: an operand has another shape, dtype or device than the forward
            read.
    """
    launches, launch, strides, from_output = kept
    dh = dh if need[0] else None
    compiling = _is_compiling()
    visible = not compiling and seen_through(dy, dh)
    if not (compiling or visible) and is_direct(dy, *saved[:4], dh):
        try:
            return _launched(kept, saved, dy, dh, need)
        except KernelUnavailable as error:
            give_up(error, dy.device)
            visible = True  # in plain torch, as for these
    if not compiling:
        saved = launch.as_saved(strides, saved, dy, dh)
    *operands, rstd, mean = saved
    spec = launches.spec
    if from_output:
        return _by_output(spec, (*operands[:3], rstd), dy, dh, need)
    if formula is not None:
        return gradients_of(formula, tuple(operands), dy, need)
    if visible:
        return by_formula(spec, operands, dy, dh, need)
    return by_operator(spec, (*operands, rstd, mean), dy, dh, need)


def _launched(kept: tuple, saved: tuple, dy, dh, need: tuple[bool, ...]):
    """The gradients by the kernels. Saved tensors are compared with those of the
    forward once for each key.
    """
    launches, forward, strides, from_output = kept
    x, weight, bias, gate, rstd, mean = saved
    reads_bias = from_output or (
        gate is not None and need[3] and launches.spec.gate != "silu_before"
    )
    kind = "backward", forward, strides, need, from_output
    key = key_of(
        kind,
        (dy, x, weight, gate, dh, bias if reads_bias else None),
        (bias, rstd, mean),
    )
    launch = launches.kept.get(key)
    if launch is None:
        laid_out = forward.as_saved(strides, saved, dy, dh)
        if any(a is not b for a, b in zip(laid_out, saved, strict=True)):
            return _launched(kept, laid_out, dy, dh, need)
        operands = dy, x, weight, bias, gate, dh, rstd, mean
        make = backward_kernels().NormBackward
        made = (
            launches.spec,
            operands,
            is_aligned(key),
            need,
            from_output,
            launches.modulation,
        )
        launch = launches.keep(key, make(*made))
    return launch.launch(dy, x, weight, bias, gate, dh, rstd, mean)


def by_formula(spec: NormSpec, operands, dy, dh, need):
    """The gradients of the plain formula, differentiable where gradients are on: for
    `create_graph`.
    """
    if torch.is_grad_enabled():

        def formula(x, weight, bias, gate):
            return (reference_norm(x, weight, bias, spec, gate),)

        grads = gradients_of_all(formula, tuple(operands), (dy,), need)
    else:
        x, weight, bias, gate = operands
        grads = reference_backward(dy, x, weight, bias, spec, need, gate)
    return grads if dh is None else (dh + grads[0], *grads[1:])


def gradients_of(formula: Callable, inputs: tuple, dy, need) -> list:
    """The gradients of any formula that returns one tensor, differentiable where
    gradients are on.
    """
    return gradients_of_all(lambda *inputs: (formula(*inputs),), inputs, (dy,), need)


def _by_output(spec: NormSpec, saved: tuple, dy, dh, need):
    y, weight, bias, rstd = saved
    if not _is_compiling() and torch.is_grad_enabled():
        raise RuntimeError(
            "create_graph=True differentiates a norm twice, for which it needs its input, and it keeps its output "
            "instead: call patch_model(model, memory_efficient=False) first"
        )
    x = input_of_output(y, weight, bias, rstd, spec)
    dx, *grads = reference_backward(dy, x, weight, bias, spec, need)
    if dx is not None:
        dx = (dx if dh is None else dh + dx).to(y.dtype)
    return dx, *grads


def _of_operator(spec: NormSpec, saved: tuple, strides: tuple, dy, need):
    """The gradients of the registered operator, in compiled code and of tensors that
    are not plain.
    """
    *operands, rstd, mean = as_saved(strides, *saved)
    if not _is_compiling() and torch.is_grad_enabled():
        return by_formula(spec, operands, dy, None, need)
    return by_operator(spec, (*operands, rstd, mean), dy, None, need)


register_gradients(_of_operator)

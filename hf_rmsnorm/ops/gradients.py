"""The gradients of the fused norms, whoever asks for them: eager autograd, `create_graph`, functorch or a compiler."""

from collections.abc import Callable
from operator import itemgetter

import torch

from ..formula import NormSpec
from ..kernels.failure import KernelUnavailable
from ..kernels.saved import Saved, require_saved
from ..reference import (
    input_of_output,
    reference_backward,
    reference_norm,
    reference_qk_backward,
    reference_qk_norm,
    rotated,
)
from .backend import give_up
from .direct import alike_to, is_direct, is_watched, under_transform
from .loading import kernels, qk_kernels
from .operators import as_saved, norm_backward_op, qk_as_saved, qk_norm_backward_op, spec_args, wanted

_is_compiling = torch.compiler.is_compiling


def _seen_through(*gradients: torch.Tensor | None) -> bool:
    """Whether what runs this backward needs operators it can see through: another differentiation, functorch, vmap."""
    return (
        torch.is_grad_enabled()
        or under_transform()
        or any(g is not None and torch._C._functorch.is_legacy_batchedtensor(g) for g in gradients)
    )


def differentiable(formula: Callable, inputs: tuple, gradients: tuple, need) -> list:
    """The gradients of ``formula(*inputs)``, a tuple, as functions of its inputs and of the gradients given."""
    with torch.enable_grad():
        # Through views of their own: where x was itself computed from the same weight, the gradient asked for is the
        # one along this norm alone.
        inputs = [t if t is None else t.view_as(t) for t in inputs]
        given = [(y, d) for y, d in zip(formula(*inputs), gradients, strict=True) if d is not None]
        outputs, gradients = zip(*given, strict=True)
        leaves = [t for t, needed in zip(inputs, need, strict=True) if needed]
        found = iter(torch.autograd.grad(outputs, leaves, gradients, create_graph=True, allow_unused=True))
    return [next(found) if needed else None for needed in need]


def _check_of(*operands: torch.Tensor | None) -> Callable[[tuple], bool]:
    """What tells whether such operands of a backward, in a tuple, are like these, of which the same are given."""
    given = [i for i, t in enumerate(operands) if t is not None]
    check, pick = alike_to([operands[i] for i in given]), itemgetter(*given)
    return lambda others: check(*pick(others))


def norm_gradients(
    dy, x, weight, bias, gate, rstd, mean, spec, from_output, plan, strides, need, dh=None, formula=None
):
    """(dx, dweight, dbias, dgate) inside a backward, in whatever that runs; `dh`, another gradient of x, is in dx.

    Under `from_output` x is what the norm returned. `plan` is that of the forward, if one was made, and `strides` are
    those that x had there. `formula` is what computes (the output,) of x, weight, bias and gate in plain torch,
    where that is not `spec`.

    Raises:
        RuntimeError: an operand has another shape, dtype or device than the forward read.
    """
    dh = dh if need[0] else None
    compiling = _is_compiling()
    asked = need, from_output, dh is None
    try:
        if plan is not None and not (compiling or torch.is_grad_enabled() or is_watched()):
            like, alike, serve = plan.last[0]
            if like == asked and alike((dy, x, weight, bias, gate, rstd, mean, dh)):
                return serve(dy, x, weight, bias, rstd, mean, gate, dh, spec.eps)
        if plan is not None and not compiling:
            _require_saved_rows(plan, (x, weight, bias, gate, rstd, mean), dy, dh)
        x, weight, bias, rstd, mean = as_saved(strides, x, weight, bias, rstd, mean)
        seen_through = not compiling and _seen_through(dy, dh)
        if not (compiling or seen_through) and is_direct(dy, x, weight, bias, gate, dh):
            grads = kernels().norm_backward(dy, x, weight, bias, rstd, mean, spec, need, gate, dh, from_output, plan)
            if plan is not None:
                alike = _check_of(dy, x, weight, bias, gate, rstd, mean, dh)
                plan.last[0] = asked, alike, kernels().backward_like(plan, dy, x, need, gate, dh, from_output)
            return grads
    except KernelUnavailable as error:
        give_up(error, dy.device)
        seen_through = True  # in plain torch, as for these
        x, weight, bias, rstd, mean = as_saved(strides, x, weight, bias, rstd, mean)
    if from_output:
        return _gradients_from_output(dy, x, weight, bias, rstd, spec, need, dh)
    if formula is not None:
        return _gradients_of(formula, (x, weight, bias, gate), dy, need)
    if seen_through:
        if torch.is_grad_enabled():  # create_graph: the formula itself is differentiable
            grads = differentiable(
                lambda x, w, b, g: (reference_norm(x, w, b, spec, g),), (x, weight, bias, gate), (dy,), need
            )
        else:
            grads = reference_backward(dy, x, weight, bias, spec, need, gate)
        return grads if dh is None else (dh + grads[0], *grads[1:])
    mean = rstd.new_empty(0) if mean is None else mean
    return wanted(norm_backward_op(dy, x, weight, bias, gate, dh, rstd, mean, *spec_args(spec), list(need)), need)


def _gradients_of(formula: Callable, inputs: tuple, dy, need) -> list:
    if torch.is_grad_enabled():  # create_graph
        return differentiable(formula, inputs, (dy,), need)
    leaves = [t if t is None else t.detach().requires_grad_(n) for t, n in zip(inputs, need, strict=True)]
    return [g if g is None else g.detach() for g in differentiable(formula, tuple(leaves), (dy,), need)]


def _require_saved_rows(plan, tensors: tuple, dy, dh) -> None:
    gradients = Saved("the gradient", plan.shape), Saved("the gradient of the sum", plan.shape)
    require_saved(plan.blank.device, (*plan.saved, *gradients), (*tensors, dy, dh))


def _gradients_from_output(dy, y, weight, bias, rstd, spec, need, dh):
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


def qk_gradients(dq, dk, saved: tuple, spec: NormSpec, need, way: str = "", plan=None):
    """The gradients of q, k, their weights and biases inside a backward; saved: these, cos, sin, rstd, mean.

    `way` is how the forward rotated, and `plan` is its own, if one was made.

    Raises:
        RuntimeError: an operand has another shape, dtype or device than the forward read.
    """
    if dq is None and dk is None:
        return (None,) * 6
    compiling = _is_compiling()
    if plan is None or compiling:
        saved = qk_as_saved(saved)
    elif not plan.last or not plan.last[0]((dq, dk, *saved)):
        saved = _qk_checked(plan, dq, dk, saved)
    q, k, *parameters, cos, sin, rstd, mean = saved
    # The kernels take back no pairs, and round every operator where the tables have the dtype of q.
    if "pairs" in way or ("once" in way and cos.dtype == q.dtype):
        dq, dk = (d if d is None else rotated(d, cos, sin, True, way) for d in (dq, dk))
        cos = sin = None
    operands = q, k, *parameters, cos, sin
    if not compiling and _seen_through(dq, dk):
        if not torch.is_grad_enabled():
            return reference_qk_backward(dq, dk, *operands, spec, need)

        def formula(q, k, q_weight, k_weight, *biases):
            made = reference_qk_norm(q, k, q_weight, k_weight, spec, cos, sin, *biases)
            return [y if dy is None else y.to(dy.dtype) for y, dy in zip(made, (dq, dk), strict=True)]

        return differentiable(formula, operands[:6], (dq, dk), need)
    if not compiling and is_direct(*operands, dq, dk):
        try:
            return qk_kernels().qk_norm_backward(dq, dk, q, k, parameters, cos, sin, rstd, mean, spec, tuple(need))
        except KernelUnavailable as error:
            give_up(error, q.device)
        return reference_qk_backward(dq, dk, *operands, spec, need)
    mean = rstd.new_empty(0) if mean is None else mean
    grads = qk_norm_backward_op(dq, dk, *operands, rstd, mean, *spec_args(spec), list(need))
    return wanted(grads, [n and d is not None for n, d in zip(need, (dq, dk) * 3, strict=True)])


def _qk_checked(plan, dq, dk, saved: tuple) -> tuple:
    """What was saved, once it is what the forward read, as the kernels read it."""
    q, k, *_ = plan.saved
    gradients = Saved("the gradient of q", q.shape), Saved("the gradient of k", k.shape)
    require_saved(plan.device, (*gradients, *plan.saved), (dq, dk, *saved))
    as_read = qk_as_saved(saved)
    if as_read is saved:  # else those like them are laid out too
        plan.last[:] = [_check_of(dq, dk, *saved)]
    return as_read

"""How a norm and its gradients are computed by launches, in autograd's graph: for eager
autograd, `create_graph`, functorch and compilers.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import compress
from operator import is_
from typing import NamedTuple

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling
from torch.linalg import vector_norm
from torch.multiprocessing.reductions import StorageWeakRef

from ..formula import NormSpec
from ..operands import (
    ONE_PLUS,
    Family,
    Kind,
    Launch,
    Needed,
    NormOperands,
    Operands,
    of_norm,
    present,
    row_major,
)
from ..reference import (
    gradients_of_output,
    input_of_output,
    reference_backward,
    reference_norm,
)
from ..rows import Shape, by_row, copied_in_order, heads_of, memory_order
from .backend import operators_are_seen
from .launches import Launches, by_kernel, kernels
from .limits import serves_as_input, why_not

_MULTIPLIER = 1 + NormOperands._fields.index("multiplier")  # behind the launch
FLOOR = 16 * 2.0**-24  # roundings of float32 in a row, of its largest term
WRITTEN = "modified by an inplace operation"


class NormFunction(torch.autograd.Function):
    """The norm of x; or, with a residual, (h, the norm of h) of ``h = residual + x``.

    The operands are `NormOperands`.
    """

    # Old-style (ctx in forward): setup_context costs 15 microseconds a call.
    @staticmethod
    def forward(ctx, call, *operands):
        launches, launch = call
        x, weight, bias, gate, scale, shift, multiplier, residual = operands
        h, y, rstd, mean = launch.on(operands)
        kept = x if h is None else h
        strides = launch.strides
        if launches.keeps_output and serves_as_input(y, kept, launches.spec):
            kept = y
            strides = y.stride()
            mean = None
        ctx.kept = launches, strides, kept is y
        ctx.weight = id(weight)
        ctx.unwatched = unwatched(kept)
        multiplied = x if ctx.needs_input_grad[_MULTIPLIER] else None
        ctx.save_for_backward(
            kept, weight, bias, gate, scale, rstd, mean, multiplier, multiplied
        )
        if h is None:
            return y
        ctx.set_materialize_grads(False)
        return h, y

    @staticmethod
    def backward(ctx, *gradients):
        *of_sum, dy = gradients
        dh = of_sum[0] if of_sum else None
        _, need_x, *of_formula, need_shift, need_multiplier, need_residual = (
            ctx.needs_input_grad
        )
        launches, strides, from_output = ctx.kept
        # once: a checkpoint gives them once
        *saved, multiplier, multiplied = saved_tensors(ctx, launches)
        dx = dh
        dweight = dbias = dgate = dscale = dmultiplier = None
        need_h = need_x or need_multiplier or need_residual
        need = need_h, *of_formula
        if dy is not None and any(need):
            dx, dweight, dbias, dgate, dscale = norm_gradients(
                ctx.kept, saved, dy, dh, need
            )
        dresidual = dx if need_residual else None
        dshift = dy if need_shift else None
        if multiplier is not None and dx is not None:
            if need_multiplier:
                dmultiplier = dx * multiplied
            dx = dx * multiplier
        if not need_x:
            dx = None
        return (
            None, dx, dweight, dbias, dgate, dscale, dshift, dmultiplier, dresidual
        )  # fmt: skip


# What Function.apply adds is for arguments by name and for functorch, neither of which
# gets here.
apply = super(torch.autograd.Function, NormFunction).apply


def forward_kind(stats: bool) -> Kind:
    """The kind of launch of a forward; `stats` as of `NormForward`."""
    return Kind(NORM, (stats,))


def make_forward(
    launches: Launches, operands: Operands, aligned: bool, stats: bool
) -> Launch | None:
    """The launch for `NormOperands`; None where no kernel serves them."""
    spec = launches.spec
    if why_not(spec, operands):
        return None
    x, weight, bias, gate, *_, residual = operands
    total = x
    if residual is not None and residual.element_size() > x.element_size():
        total = residual
    if launches.suits is not None and not launches.suits(total, weight, bias, gate):
        return None
    make = kernels().NormForward
    return make(spec, operands, aligned, stats, launches.modulation)


def _plain_results(launches: Launches, how: tuple, operands: Operands) -> tuple:
    """(h or None, y) in plain torch."""
    x, weight, bias, gate, scale, shift, multiplier, residual = operands
    h = None
    if multiplier is not None:
        x = x * multiplier
    if residual is not None:
        h = x = residual + x
    y = reference_norm(x, weight, bias, launches.spec, gate)
    return h, _modulated(launches, y, scale, shift)


def _modulated(launches: Launches, y: Tensor, scale, shift=None) -> Tensor:
    if scale is not None:
        y = y * (1 + scale if launches.modulation == ONE_PLUS else scale)
    if shift is not None:
        y = y + shift
    return y


def _exact_results(launches: Launches, how: tuple, operands: Operands) -> tuple:
    """A norm loses digits where a mean is subtracted, or where a bias cancels it."""
    h, y = _plain_results(launches, how, operands)
    x, weight, bias, gate, scale, shift, multiplier, residual = operands
    spec = launches.spec
    terms = 1.0 if weight is None else spec.weight_offset + largest(weight)
    terms = terms * _factor(gate, scale)
    if bias is not None:
        terms = terms + largest(bias)
    if shift is not None:
        terms = terms + largest(shift, -1)
    floor = FLOOR * terms
    if spec.centered:
        variance, mean = torch.var_mean(x if h is None else h, -1, unbiased=False)
        floor = floor * _condition(mean, (variance + spec.eps).rsqrt())
    return (h, y), (0.0, floor)


def _factor(gate, scale) -> Tensor | float:
    """What a gate and a scale may multiply each row by, at most."""
    factor = 1.0
    for t in present(gate, scale):
        factor = factor + largest(t, -1)
    return factor


def _condition(mean: Tensor, rstd: Tensor) -> Tensor:
    """How much larger an error of a row of x is in its normalised x."""
    return 1.0 + mean.abs() * rstd


def largest(t: Tensor, dim: int | None = None) -> Tensor:
    """The largest magnitude in a tensor, or along a dimension of it."""
    return vector_norm(t, torch.inf, dim)


NORM = Family("norm", make_forward, _plain_results, _exact_results, 1)


def needs_operators() -> bool:
    """Whether what runs this backward needs operators it can see through: a compiler,
    another differentiation, functorch, a mode.
    """
    return is_compiling() or is_grad_enabled() or operators_are_seen()


def gradients_of_all(
    formula: Callable, inputs: Operands, gradients: Operands, need
) -> list:
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
        # not of a head whose operands are all frozen
        asks = [y.requires_grad for y in outputs]
        grads = torch.autograd.grad(
            list(compress(outputs, asks)),
            leaves,
            list(compress(gradients, asks)),
            create_graph=create_graph,
            allow_unused=True,
        )
    of_leaves = iter(grads)
    return [next(of_leaves) if needed else None for needed in need]


def norm_gradients(kept: tuple, saved: Operands, dy, dh, need: Needed) -> tuple:
    """(dx, dweight, dbias, dgate, dscale) inside a backward, in whatever that runs.

    Args:
        kept: of the forward: its launches; the strides that x had, in whose order rstd
            has a value for each row (hooks of saved tensors may return x with others);
            whether the norm's output was saved in the place of x.
        saved: x, weight, bias, gate, scale, rstd, mean. rstd is None where plain torch
            has computed it.
        dy: the gradient of the norm.
        dh: another gradient of x, which is added to dx; or None.
        need: which of the results are wanted.

    Raises:
        RuntimeError: an operand has another shape or device than the forward read.
    """
    launches, strides, from_output = kept
    x, weight, bias, gate, scale, rstd, mean = saved
    if not need[0]:
        dh = None
    # the kernel reads a scale in its place
    added = dh if scale is None else None
    grads = None
    if rstd is not None and not needs_operators():
        kind = backward_kind(strides, need, from_output)
        operands = dy, x, weight, bias, gate, scale, added, rstd, mean
        grads = by_kernel(launches, kind, operands)
    if grads is None:
        added = None
        if from_output:
            x = _input_of(launches.spec, x, weight, bias, rstd)
        grads = by_formula(launches, (x, weight, bias, gate, scale), dy, need)
    if dh is None or added is not None:
        return grads
    dx, *others = grads
    return dh + dx, *others


def backward_kind(strides: Shape, need: Needed, from_output: bool = False) -> Kind:
    """The kind of launch of a backward.

    Args:
        strides: those of x, by which its rows are numbered.
        need: which gradients are wanted.
        from_output: x is the norm's output.
    """
    return Kind(GRADIENTS, (strides, need, from_output))


def make_backward(
    launches: Launches,
    operands: Operands,
    aligned: bool,
    strides: Shape,
    need: Needed,
    from_output: bool,
) -> Launch | None:
    """The launch for `GradientOperands`; None where no kernel serves them."""

    def make(read: Operands) -> Launch | None:
        _, x, weight, bias, gate, *_ = read
        if why_not(launches.spec, of_norm(x, weight, bias, gate)):
            return None
        return kernels().NormBackward(
            launches.spec, read, aligned, need, from_output, launches.modulation
        )

    return made_for(operands, partial(_as_read, strides), make)


def _plain_gradients(launches: Launches, how: tuple, operands: Operands) -> tuple:
    """The gradients of the plain formula, by autograd."""
    dy, x, weight, bias, gate, scale, dh, rstd, mean = operands
    strides, need, from_output = how
    if from_output:
        grads = gradients_of_output(dy, x, weight, bias, rstd, launches.spec, need)
    else:
        grads = _by_autograd(launches, (x, weight, bias, gate, scale), dy, need)
    dx, *others = grads
    if dh is not None:
        dx = dh + dx
    return dx, *others


def _exact_gradients(launches: Launches, how: tuple, operands: Operands) -> tuple:
    """Gradients are small differences of these terms."""
    dy, x, weight, bias, gate, scale, dh, rstd, mean = operands
    strides, need, from_output = how
    terms = FLOOR * largest(dy, -1)
    of_gate = 0.0 if bias is None else terms * largest(bias)
    factor = _factor(gate, scale)
    terms = terms * factor
    if mean is not None:
        terms = terms * _condition(mean, rstd).squeeze(-1)
    of_sums = terms.sum()
    if weight is not None:
        terms = terms * (launches.spec.weight_offset + largest(weight))
    of_x = terms * rstd.squeeze(-1) * factor
    of_gate = of_gate + terms * x.shape[-1] ** 0.5  # the largest of a normalised x
    if launches.spec.gate == "silu_before":
        of_gate = of_x * largest(x, -1)
    floors = of_x, of_sums, of_sums, of_gate, of_gate
    return _plain_gradients(launches, how, operands), floors


def _in_rows(launches: Launches, operands: Operands) -> tuple:
    """Operands with the statistics of each row of x."""
    dy, x, weight, bias, gate, scale, dh, *stats = operands
    heads = heads_of(weight, bias)
    of_rows = [by_row(t, x, launches.spec, heads) for t in stats]
    stats = [t if t is None else t.unsqueeze(-1) for t in of_rows]
    return dy, x, weight, bias, gate, scale, dh, *stats


GRADIENTS = Family(
    "the gradient of a norm",
    make_backward,
    _plain_gradients,
    _exact_gradients,
    2,
    is_back=True,
    essential=lambda strides, need, from_output: (need, from_output),
    by_rows=_in_rows,
)


@dataclass
class OnCopies:
    """A launch on operands in another layout than it was made for: it copies them.

    Hooks of saved tensors (`torch.autograd.graph.save_on_cpu`) may give tensors back
    with other strides than the forward read.

    Args:
        inner: the launch.
        prepare: ``prepare(operands)`` returns them in the layout that it reads.
    """

    inner: Launch
    prepare: Callable

    def on(self, operands: Operands) -> tuple:
        return self.inner.on(self.prepare(operands))


def made_for(operands: Operands, prepare: Callable, make: Callable) -> Launch | None:
    """The launch that ``make(prepare(operands))`` returns, on prepared operands."""
    read = prepare(operands)
    launch = make(read)
    if launch is None or all(map(is_, read, operands)):
        return launch
    return OnCopies(launch, prepare)


def _as_read(strides: Shape, operands: Operands) -> tuple:
    dy, x, weight, bias, gate, scale, dh, rstd, mean = operands
    shape = dy.shape
    of_stats = (math.prod(shape[:-1]),)
    dimensions = [p.dim() for p in present(weight, bias)]
    of_parameter = shape[-max(dimensions, default=1) :]
    expected = {
        "x": (x, shape),
        "gate": (gate, shape),
        "scale": (scale, shape),
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
    return dy, x, weight, bias, gate, scale, dh, rstd, mean


def by_formula(launches: Launches, operands: Operands, dy, need: Needed) -> tuple:
    """The gradients of the plain formula, differentiable where gradients are on: for
    `create_graph`.

    Args:
        operands: x, weight, bias, gate and scale.
        need: which of their gradients are wanted.
    """
    x, weight, bias, gate, scale = operands
    spec = launches.spec
    if scale is None and not is_grad_enabled():
        return *reference_backward(dy, x, weight, bias, spec, need, gate), None
    return _by_autograd(launches, operands, dy, need)


def _by_autograd(launches: Launches, operands: Operands, dy, need: Needed) -> tuple:
    def formula(x, weight, bias, gate, scale):
        y = reference_norm(x, weight, bias, launches.spec, gate)
        return (_modulated(launches, y, scale).to(dy.dtype),)

    return tuple(gradients_of_all(formula, operands, (dy,), need))


def _input_of(spec: NormSpec, y: Tensor, weight, bias, rstd: Tensor) -> Tensor:
    """The input of a norm whose output is saved in its place."""
    if not is_compiling() and is_grad_enabled():
        raise RuntimeError(
            "create_graph=True differentiates a norm twice, for which it needs its input, and it keeps its output "
            "instead: call patch_model(model, memory_efficient=False) first"
        )
    rstd = by_row(rstd, y, spec, heads_of(weight, bias))
    return input_of_output(y, weight, bias, rstd, spec)


class Unwatched(NamedTuple):
    """A tensor that hooks of saved tensors take, which keep autograd from looking for a
    write.

    Args:
        version: its version then.
        storage: its memory; None under `torch.utils.checkpoint`, which computes the
            tensor again.
    """

    version: int
    storage: StorageWeakRef | None

    def is_written(self, t: Tensor) -> bool:
        """Whether a tensor that the hooks give back was written to since; not if it is
        a copy.
        """
        is_copy = False
        if self.storage is not None:
            is_copy = StorageWeakRef(t.untyped_storage()) != self.storage
        return not is_copy and t._version > self.version


def unwatched(t: Tensor) -> Unwatched | None:
    """A tensor that a forward saves, if there are hooks of saved tensors."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None:
        return None
    storage = None
    if hooks[0].__module__ != "torch.utils.checkpoint":
        storage = StorageWeakRef(t.untyped_storage())
    return Unwatched(t._version, storage)


def saved_tensors(ctx, launches: Launches) -> tuple:
    """The tensors that a forward has saved for its backward.

    Args:
        ctx: of the autograd function; its `weight` is the id of the norm's weight, its
            `unwatched` that of the first tensor.

    Raises:
        RuntimeError: one was written to in place; the error names the norm.
    """
    try:
        saved = ctx.saved_tensors
    except RuntimeError as error:
        if launches.paths_of is None or WRITTEN not in str(error):
            raise
        raise _written(ctx, launches) from error
    if ctx.unwatched is not None and ctx.unwatched.is_written(saved[0]):
        raise _written(ctx, launches)
    return saved


def _written(ctx, launches: Launches) -> RuntimeError:
    paths = [] if launches.paths_of is None else launches.paths_of(ctx.weight)
    which = ", ".join(map(repr, paths[:3])) or "a norm"
    if len(paths) > 3:
        which += ", ..."
    exclude = f"[{which}]" if paths else "its path"
    return RuntimeError(
        f"{which}: what this norm keeps for its backward has been {WRITTEN} since its forward. "
        f"Where the model trains unpatched, leave it out: patch_model(model, exclude={exclude})"
    )


def require_unchanged(device, expected: dict) -> None:
    """Check that tensors are as the forward read them: name -> (tensor, its shape then).

    ``weight.data = torch.empty(0)``, as offloading by hand does, changes a saved
    tensor, and autograd does not notice. A kernel would read past its end.

    Raises:
        RuntimeError: one has another shape or device.
    """
    for name, (t, shape) in expected.items():
        if t is None or (t.shape == shape and t.device == device):
            continue
        raise RuntimeError(
            f"{name} changed between forward and backward: the backward expects shape {tuple(shape)} on {device}, "
            f"and finds {tuple(t.shape)} on {t.device}; keep what a forward has read as it is until its backward "
            "has run"
        )

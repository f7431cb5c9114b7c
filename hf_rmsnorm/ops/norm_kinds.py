"""The launches of norms: which there are for given operands, and the same in plain torch.

`launches` asks these kinds where it has no launch yet. The launches themselves are in
`kernels.norm_launch`.
"""

import math
from collections import namedtuple

import torch
from torch import Tensor

from ..operands import Operands, of_norm, present
from ..reference import gradients_of_output, reference_norm
from ..rows import by_row, heads_of, row_order
from .kinds import FLOOR, Kind, Launch, largest
from .launches import Launches, kernels
from .limits import why_not
from .plain import autograd_gradients, one_by_one
from .saved import require_unchanged


class NormForwardKind(namedtuple("NormForwardKind", "stats"), Kind):
    """Forwards: from `NormOperands` to `NormResults`.

    Args:
        stats: as of `NormForward`.
    """

    __slots__ = ()
    name = "norm"
    weight_at = 1

    def make(
        self, launches: Launches, operands: Operands, aligned: bool
    ) -> Launch | None:
        spec = launches.spec
        if why_not(spec, operands):
            return None
        x, weight, bias, *_, residual = operands
        total = x
        if residual is not None and residual.element_size() > x.element_size():
            total = residual
        if launches.suits is not None and not launches.suits(total, weight, bias):
            return None
        make = kernels().NormForward
        return make(spec, operands, aligned, self.stats, launches.modulation)

    def results(self, launches: Launches, operands: Operands) -> Operands:
        _, weight, bias, gate, *_ = operands

        def norm(x):
            return reference_norm(x, weight, bias, launches.spec, gate)

        return one_by_one(launches.modulation, operands, norm)

    def floors(self, launches: Launches, operands: Operands, exact: Operands) -> tuple:
        """A norm loses digits where a mean is subtracted, or where a bias cancels it."""
        h, _ = exact
        x, weight, bias, gate, scale, shift, *_ = operands
        spec = launches.spec
        terms = 1.0 if weight is None else spec.weight_offset + largest(weight)
        terms = terms * _factor(gate, scale)
        if bias is not None:
            terms = terms + largest(bias)
        if shift is not None:
            terms = terms + largest(shift, -1)
        floor = FLOOR * terms
        if spec.centered:
            total = x if h is None else h
            variance, mean = torch.var_mean(total, -1, unbiased=False)
            rstd = (variance + spec.eps).rsqrt()
            floor = floor * _condition(mean, rstd)
        return 0.0, floor


def _factor(gate, scale) -> Tensor | float:
    """What a gate and a scale may multiply each row by, at most."""
    factor = 1.0
    for t in present(gate, scale):
        factor = factor + largest(t, -1)
    return factor


def _condition(mean: Tensor, rstd: Tensor) -> Tensor:
    """How much larger an error of a row of x is in its normalised x."""
    return 1.0 + mean.abs() * rstd


class NormBackwardKind(namedtuple("NormBackwardKind", "order need from_output"), Kind):
    """Backwards: from `GradientOperands` to (dx, dweight, dbias, dgate, dscale).

    Args:
        order: of the rows of x in the forward, as `row_order` gives it.
        need: which gradients are wanted.
        from_output: x is the norm's output.
    """

    __slots__ = ()
    name = "the gradient of a norm"
    weight_at = 2
    is_back = True

    def make(
        self, launches: Launches, operands: Operands, aligned: bool
    ) -> Launch | None:
        _, x, weight, bias, gate, *_, rstd, mean = operands
        _require_unchanged(operands)
        if why_not(launches.spec, of_norm(x, weight, bias, gate)):
            return None
        # a hook of saved tensors may have copied them, in another order
        order = row_order(x, launches.spec, heads_of(weight, bias))
        has_gaps = any(not t.is_contiguous() for t in present(rstd, mean))
        if order != self.order or has_gaps:
            return None
        return kernels().NormBackward(
            launches.spec,
            operands,
            aligned,
            self.need,
            self.from_output,
            launches.modulation,
        )

    def results(self, launches: Launches, operands: Operands) -> Operands:
        """The gradients of the plain formula, by autograd."""
        spec = launches.spec
        dy, x, weight, bias, gate, scale, dh, rstd, mean = operands
        if self.from_output:
            grads = gradients_of_output(dy, x, weight, bias, rstd, spec, self.need)
        else:
            read = x, weight, bias, gate, scale
            grads = autograd_gradients(spec, launches.modulation, read, dy, self.need)
        dx, *others = grads
        if dh is not None:
            dx = dh + dx
        return dx, *others

    def floors(self, launches: Launches, operands: Operands, exact: Operands) -> tuple:
        """Gradients are small differences of these terms."""
        dy, x, weight, bias, gate, scale, dh, rstd, mean = operands
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
        return of_x, of_sums, of_sums, of_gate, of_gate

    def in_rows(self, launches: Launches, operands: Operands) -> Operands:
        """With the statistics of each row of x, (..., 1)."""
        dy, x, *others, rstd, mean = operands
        stats = [by_row(t, x, self.order) for t in (rstd, mean)]
        stats = [t if t is None else t.unsqueeze(-1) for t in stats]
        return dy, x, *others, *stats


def _require_unchanged(operands: Operands) -> None:
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

"""A patched norm in a server's order of rounding."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import Module

from ...formula import NormSpec
from ...fused.asked import Asked
from ...fused.norm import PatchedNorm
from ...fused.recipe import changed
from ...ops.launches import Launches
from .summands import summands_of
from .unrounded import norm_of_summands


def reads_unrounded(asked: Asked) -> bool:
    """Whether a norm that is asked so reads residual sums before they are rounded."""
    rounding = asked.rounding
    return asked.fuse_residual and rounding is not None and not rounding.rounds_sum


class ServerNorm(PatchedNorm):
    """A norm that may read a residual sum before it is rounded, and may round to the
    dtype of its input at the end.
    """

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.rounds_sum = not reads_unrounded(self.asked)
        self.returns_dtype_of_x = self.asked.rounding.returns_dtype_of_x
        self.is_plain = self.is_plain and not self.returns_dtype_of_x

    def formula_of(self, spec: NormSpec, x: Tensor, weight, gate) -> NormSpec | None:
        spec = super().formula_of(spec, x, weight, gate)
        if spec is None or weight is None or not self.returns_dtype_of_x:
            return spec
        if weight.dtype == x.dtype:
            return spec
        # multiplied in the weight's dtype, and rounded to x's behind that
        eps = torch.finfo(x.dtype).eps
        is_coarser = torch.finfo(weight.dtype).eps > eps
        rounding = "weight_dtype" if is_coarser else "once"
        return changed(spec, rounding=rounding)

    def wrapped(self, forward: Callable) -> Callable:
        if self.rounds_sum:
            return forward
        # A graph has no summands: it breaks here, and goes on behind the norm.
        return torch.compiler.disable(forward)

    def run(self, module: Module, launches: Launches, operands: tuple):
        """The norm of the sum of x's summands before it is rounded, where these were
        kept.
        """
        if self.rounds_sum:
            return super().run(module, launches, operands)
        x, weight, bias, *_ = operands
        summands = summands_of(module, x)
        if summands is None:
            return super().run(module, launches, operands)
        return norm_of_summands(x, *summands, weight, bias, launches.spec)

    def returned(self, x: Tensor, y: Tensor) -> Tensor:
        if self.returns_dtype_of_x:
            y = y.to(x.dtype)
        return super().returned(x, y)

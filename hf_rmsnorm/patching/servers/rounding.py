"""In whose order of rounding a norm is computed: the model's own, or that of the server
that generates for it.

`docs/correctness.md` states each order, with the source it was read from.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import Module

from ...formula import NormSpec
from ...fused.norm import NormPatch
from ...fused.recipe import Asked, Recipe, changed
from ...ops.launches import Launches
from .summands import norm_of_summands, summands_of

# What `rounding_of` follows, by name.
SERVERS = {
    "vllm": "vLLM 0.33.0",
    "sglang": "SGLang 0.5.23",
    "torch": "torch.nn.functional",
}
NUMERICS = ("model", *SERVERS)


def reads_unrounded(asked: Asked) -> bool:
    """Whether a norm that is asked so reads residual sums before they are rounded."""
    rounding = asked.rounding
    return asked.fuse_residual and rounding is not None and not rounding.rounds_sum


class ServerNorm(NormPatch):
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


@dataclass(frozen=True)
class ServerRounding:
    """The `fused.recipe.Rounding` of a server.

    Attributes:
        rounds_sum: a residual sum is rounded before it is normalised; else the norm
            reads it as float32 holds it.
        returns_dtype_of_x: as vLLM's RMSNorm, which multiplies in the weight's dtype.
    """

    name: str
    spec: NormSpec
    rounds_sum: bool
    row_major: bool
    returns_dtype_of_x: bool

    def norm_class(self) -> type[NormPatch]:
        return ServerNorm

    def __str__(self) -> str:
        return SERVERS[self.name]


def rounding_of(
    numerics: str, proven: Recipe, formula: NormSpec
) -> ServerRounding | None:
    """The order of rounding of that name for a norm; None for the model's own.

    Args:
        proven: what the norm's own forward computes.
        formula: what it is to compute.

    Raises:
        ValueError: the server has no such formula.
    """
    if numerics == "model":
        return None
    served = None
    where = ""
    if proven.layout != "last":
        where = f" {proven.notes()}"
    elif not proven.other_input:
        served = _formula(numerics, formula)
    if served is None:
        raise ValueError(f"{SERVERS[numerics]} has no {formula}{where}")
    spec, rounds_sum = served
    # what follows may count on the order in memory of torch's own norms
    loses_order = formula.functional and not spec.functional
    multiplies_last = numerics == "vllm" and spec.rounding == "before_weight"
    return ServerRounding(numerics, spec, rounds_sum, loses_order, multiplies_last)


def _formula(numerics: str, own: NormSpec) -> tuple[NormSpec, bool] | None:
    """(the formula in the server's order of rounding, whether a residual sum in front
    of it is rounded first).
    """
    if own.eps_outside:
        return None
    if own.gate is not None or own.group_size is not None:
        return _gated_formula(own) if numerics == "vllm" else None
    if own.centered or numerics == "torch":
        return _formula_of_torch(own)
    if own.has_bias:
        return None
    spec = replace(own, rounding="once", functional=False)
    has_offset = own.weight_offset != 0.0
    if numerics == "sglang":
        return spec, has_offset
    if own.has_weight and not has_offset:
        spec = replace(spec, rounding="before_weight")
    return spec, False


def _formula_of_torch(own: NormSpec) -> tuple[NormSpec, bool] | None:
    """`F.layer_norm`, or `F.rms_norm`, which has no bias."""
    has_rms_bias = own.has_bias and not own.centered
    if own.weight_offset != 0.0 or has_rms_bias:
        return None
    return replace(own, rounding="once", functional=True), True


def _gated_formula(own: NormSpec) -> tuple[NormSpec, bool] | None:
    """vLLM's `Mixer2RMSNormGated`, with the gate before the norm; else its
    `RMSNormGated` with ``norm_before_gate``.
    """
    if own.centered or own.weight_offset != 0.0 or own.has_bias:
        return None
    rounding = "once"
    if own.gate == "silu_before":
        if own.has_weight:
            rounding = "before_weight"
    elif own.group_size:
        return None
    return replace(own, rounding=rounding, functional=False), True

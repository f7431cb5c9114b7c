"""The formulas of normalisation layers, as data that a program can compare.

Kernels, operators, the patcher, verification and reports all take a `NormSpec`; none
depends on a model's name.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Literal, NamedTuple, get_args

import torch

# A container's 2.10.0a0+b4e4ee81d3 is a 2.10 here, and compares as older.
TORCH_RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))
if TORCH_RELEASE < (2, 8):  # which brings a Triton older than 3.4
    raise ImportError(
        f"hf_rmsnorm needs torch 2.8 or newer, this is {torch.__version__}: pip install -U torch"
    )

OptionalTensor = torch.Tensor | None
Rounding = Literal["once", "before_weight", "weight_dtype", "rstd"]
ROUNDINGS = get_args(Rounding)
Gate = Literal["silu_before", "silu_after", "sigmoid_after"]
GATES = get_args(Gate)
HALF_DTYPES = (torch.float16, torch.bfloat16)
_ROUNDING_WORDS = {
    "once": "one rounding",
    "before_weight": "rounds before weight",
    "weight_dtype": "rounds to weight's dtype",
    "rstd": "rounds rstd",
}


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype norms are computed in: float32, or float64 for float64 inputs."""
    if dtype == torch.float64:
        return dtype
    return torch.float32


def promoted(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """The dtype of arithmetic on both."""
    # Equal dtypes first: torch.promote_types leaves an operator in exported graphs.
    if a == b:
        return a
    return torch.promote_types(a, b)


def dtype_of(t: OptionalTensor) -> torch.dtype | None:
    return None if t is None else t.dtype


@dataclass(frozen=True)
class NormSpec:
    """The formula of one RMSNorm or LayerNorm over the last dimension of its input.

    In float32 ``xhat = (x - mean) * rsqrt(mean((x - mean)^2) + eps)``; ``mean`` is 0
    unless `centered`. The result is ``xhat * (weight_offset + weight) + bias``,
    rounded where `rounding` says.

    Args:
        centered: True for LayerNorm (Ba et al. 2016), False for RMSNorm (Zhang and
            Sennrich 2019).
        eps: added to the mean square, inside the root unless `eps_outside`. 0.0 is
            allowed and kept.
        has_weight, has_bias: whether the layer scales and shifts.
        weight_offset: 1.0 where the stored weight is the difference from one
            (`GemmaRMSNorm`), else 0.0. Their sum is rounded to the weight's dtype
            before use, unless `rounding` is ``"once"`` and the norm not `functional`.
        rounding: where float32 becomes the output dtype.

            - ``"once"``: at the end, to x's dtype (`Olmo2RMSNorm`, `GemmaRMSNorm`,
              `nn.LayerNorm`).
            - ``"before_weight"``: xhat is rounded to x's dtype, then multiplied, so the
              output has the promoted dtype of x and weight (`LlamaRMSNorm` and most
              others).
            - ``"weight_dtype"``: xhat is rounded to the weight's dtype if that is half
              precision, else kept in float32; the output has that dtype
              (`T5LayerNorm`).
            - ``"rstd"``: the factor rsqrt(...) is rounded to x's dtype, and so is its
              product with x (`DeepseekV4UnweightedRMSNorm`); then as
              ``"before_weight"``.
        functional: the layer calls torch's own `F.layer_norm` or `F.rms_norm` instead
            of spelling the formula out. Under autocast on an accelerator those compute,
            and return, float32. Their results are row-major, where pointwise arithmetic
            keeps the order of its input's strides.
        eps_outside: divide by ``sqrt(mean(...)) + eps``, as the textbook does, instead
            of ``sqrt(mean(...) + eps)``.
        gate: a second input of x's shape. ``"silu_before"`` normalises ``x *
            silu(gate)`` (`MambaRMSNormGated`); ``"silu_after"``
            (`Qwen3NextRMSNormGated`) and ``"sigmoid_after"`` (`KimiLinearRMSNormGated`)
            multiply the result, which then has x's dtype.
        group_size: each run of so many elements is normalised by itself, with a weight
            for every element of the row (`MambaRMSNormGated`); None for the whole row.

    Attributes:
        axes: the differences from a plain RMSNorm, eps and an absent weight aside: the
            names of the fields that differ, those of words with their value
            (``"rounding=rstd"``). `kernels.serves` lists those that kernels compute.
        ungrouped: the formula of one group; only with a `group_size`.

    Raises:
        ValueError: eps is negative, NaN or infinite; rounding or gate is unknown; an
            offset without a weight; a `functional` norm with its eps outside the root,
            or with another rounding than ``"once"`` and ``"before_weight"``.
    """

    centered: bool
    eps: float
    has_weight: bool = True
    has_bias: bool = False
    weight_offset: float = 0.0
    rounding: Rounding = "once"
    functional: bool = False
    eps_outside: bool = False
    gate: Gate | None = None
    group_size: int | None = None

    def __post_init__(self):
        wrong = _wrong_value(self) or _wrong_combination(self)
        if wrong is not None:
            raise ValueError(wrong)
        # Set here and no cached properties, which Dynamo does not trace.
        object.__setattr__(self, "axes", _axes(self))
        if self.group_size is not None:
            object.__setattr__(self, "ungrouped", replace(self, group_size=None))

    @property
    def kind(self) -> str:
        """``"LayerNorm"`` if centered, else ``"RMSNorm"``."""
        if self.centered:
            return "LayerNorm"
        return "RMSNorm"

    def with_eps(self, eps: float) -> NormSpec:
        """The same formula with another eps."""
        if eps == self.eps:
            return self
        return replace(self, eps=eps)

    @property
    def gated_after(self) -> bool:
        """Whether the gate multiplies the result of the norm, not its input."""
        return self.gate is not None and self.gate.endswith("_after")

    @property
    def rounds_offset(self) -> bool:
        """Whether ``weight_offset + weight`` is rounded to the weight's dtype."""
        if self.weight_offset == 0.0:
            return False
        return self.functional or self.rounding != "once"

    def hat_dtype(
        self, x_dtype: torch.dtype, weight_dtype: torch.dtype | None
    ) -> torch.dtype:
        """The dtype xhat is rounded to before the weight is applied (float32 or wider:
        not rounded).
        """
        if self.rounding in ("before_weight", "rstd"):
            return x_dtype
        if self.rounding == "weight_dtype" and weight_dtype in HALF_DTYPES:
            return weight_dtype
        return compute_dtype(x_dtype)

    def output_dtype(
        self, x_dtype: torch.dtype, weight_dtype: torch.dtype | None
    ) -> torch.dtype:
        """The dtype the layer returns for an input of x_dtype; weight_dtype is None
        without a weight.
        """
        if self.gated_after or self.rounding == "once" or weight_dtype is None:
            return x_dtype
        return promoted(self.hat_dtype(x_dtype, weight_dtype), weight_dtype)

    def to_dict(self) -> dict:
        """Plain values for JSON: ``kind`` and every field."""
        return {"kind": self.kind, **asdict(self)}

    def __str__(self) -> str:
        words = [f"eps={self.eps:g}"]
        if self.eps_outside:
            words[0] += " outside the root"
        if not self.has_weight:
            words.append("no weight")
        if self.has_weight or self.rounding != "once":
            words.append(_ROUNDING_WORDS[self.rounding])
        if self.weight_offset:
            words.append(f"weight + {self.weight_offset:g}")
        if self.has_bias:
            words.append("bias")
        if self.group_size is not None:
            words.append(f"groups of {self.group_size}")
        if self.gate is not None:
            function, place = self.gate.split("_")
            words.append(f"{function}(gate) {place}")
        return f"{self.kind}({', '.join(words)})"


def _wrong_value(spec: NormSpec) -> str | None:
    """The field that has no valid value, in words, or None."""
    eps = spec.eps
    if not isinstance(eps, float) or not 0.0 <= eps < math.inf:
        return f"eps is {eps!r}: pass a finite float that is zero or more"
    if spec.rounding not in ROUNDINGS:
        return f"rounding is {spec.rounding!r}: choose one of {', '.join(ROUNDINGS)}"
    if spec.gate not in (None, *GATES):
        return f"gate is {spec.gate!r}: choose one of {', '.join(GATES)}, or None"
    return None


def _wrong_combination(spec: NormSpec) -> str | None:
    """The fields that exclude each other, in words, or None."""
    if spec.rounding == "rstd" and spec.gate is not None:
        return "a gated norm does not round by 'rstd'"
    if spec.rounding == "rstd" and (spec.centered or spec.eps_outside):
        return "a rounded rstd is that of an RMSNorm with its eps inside the root"
    if spec.functional and (
        spec.eps_outside or spec.rounding in ("weight_dtype", "rstd")
    ):
        return "torch's own norms have their eps inside the root, and round once or before a weight"
    reads_weight = spec.rounding in ("before_weight", "weight_dtype")
    if not spec.has_weight and (spec.weight_offset or reads_weight):
        return "a norm without weight has no weight_offset, and no rounding that depends on a weight"
    return None


def _axes(spec: NormSpec) -> frozenset[str]:
    axes = set()
    for name, field in spec.__dataclass_fields__.items():
        value = getattr(spec, name)
        plain = field.default
        if name == "centered":
            plain = False
        if name in ("eps", "has_weight") or value == plain:
            continue
        if isinstance(value, str):
            name = f"{name}={value}"
        axes.add(name)
    return frozenset(axes)


class Rotation(NamedTuple):
    """How a rotary embedding turns the columns of q and k, and where it rounds.

    Args:
        once: it is computed in float32, and its result is rounded to the dtype of q;
            else every operator rounds.
        casts_twice: where once, each of its two factors is cast to float32, or promoted
            by cos and sin. So autograd rounds both products of its gradient; else their
            sum alone.
        reads_pairs: columns 2i and 2i + 1 turn with each other; else i and i + half.
        writes_pairs: the same of the results.
        tables: the columns of cos and sin: ``"all"`` where each column of q has its
            own; ``"first"`` where the pair i reads column i, of as many columns as
            turn; ``"half"`` where it does, and there are half as many.
    """

    once: bool = False
    casts_twice: bool = False
    reads_pairs: bool = False
    writes_pairs: bool = False
    tables: Literal["all", "first", "half"] = "all"

    @property
    def turns_halves(self) -> bool:
        """Whether it turns halves by tables of all columns, as the norms' kernels do."""
        return not (self.reads_pairs or self.writes_pairs) and self.tables == "all"

    def columns(self, of_tables: int) -> int:
        """How many columns turn by tables of so many."""
        return 2 * of_tables if self.tables == "half" else of_tables


HALVES = Rotation()

"""The one vocabulary of this package: what a normalisation layer computes, in words a program can compare.

Kernels, operators, the patcher, verification and reports all speak `NormSpec`; none of them knows a model's name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch

Rounding = Literal["once", "before_weight", "weight_dtype"]
ROUNDINGS: tuple[str, ...] = ("once", "before_weight", "weight_dtype")
HALF_DTYPES = (torch.float16, torch.bfloat16)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype norms are computed in: float32, or float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _promote(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    # Equal dtypes first: torch.promote_types leaves an operator in exported graphs.
    return a if a == b else torch.promote_types(a, b)


@dataclass(frozen=True)
class NormSpec:
    """What one RMSNorm or LayerNorm computes over the last dimension of its input.

    With ``xhat = (x - mean) * rsqrt(mean((x - mean)^2) + eps)`` in float32 (``mean`` is 0 unless `centered`)
    the result is ``xhat * (weight_offset + weight) + bias``, rounded where `rounding` says.

    Args:
        centered: True for LayerNorm (Ba et al. 2016), False for RMSNorm (Zhang and Sennrich 2019).
        eps: added to the mean square, inside the root. 0.0 is allowed and kept.
        has_weight, has_bias: whether the layer scales and shifts.
        weight_offset: 1.0 where the stored weight is the difference from one (`GemmaRMSNorm`), else 0.0.
        rounding: where float32 becomes the output dtype.

            - ``"once"``: at the very end, to x's dtype (`Olmo2RMSNorm`, `GemmaRMSNorm`, `nn.LayerNorm`).
            - ``"before_weight"``: xhat is rounded to x's dtype, then multiplied, so the output has the promoted
              dtype of x and weight (`LlamaRMSNorm` and most others).
            - ``"weight_dtype"``: xhat is rounded to the weight's dtype if that is half precision, else kept in
              float32; the output has that dtype (`T5LayerNorm`).
        functional: the layer calls torch's own `F.layer_norm` or `F.rms_norm` instead of spelling the formula out.
            Under autocast on an accelerator those compute, and return, float32.

    Raises:
        ValueError: eps is negative, NaN or infinite; rounding is unknown; a bias or offset without a weight.
    """

    centered: bool
    eps: float
    has_weight: bool = True
    has_bias: bool = False
    weight_offset: float = 0.0
    rounding: Rounding = "once"
    functional: bool = False

    def __post_init__(self):
        if not (isinstance(self.eps, float) and 0.0 <= self.eps < math.inf):
            raise ValueError(f"eps is {self.eps!r}: pass a finite float that is zero or more")
        if self.rounding not in ROUNDINGS:
            raise ValueError(f"rounding is {self.rounding!r}: choose one of {', '.join(ROUNDINGS)}")
        if not self.has_weight and (self.weight_offset or self.rounding != "once"):
            raise ValueError("a norm without weight rounds once and has no weight_offset: leave both at their defaults")

    @property
    def kind(self) -> str:
        """``"LayerNorm"`` if centered, else ``"RMSNorm"``."""
        return "LayerNorm" if self.centered else "RMSNorm"

    def with_eps(self, eps: float) -> NormSpec:
        """The same formula with another eps."""
        return self if eps == self.eps else replace(self, eps=eps)

    def hat_dtype(self, x_dtype: torch.dtype, weight_dtype: torch.dtype | None) -> torch.dtype:
        """The dtype xhat is rounded to before the weight is applied (float32 or wider: not rounded)."""
        if self.rounding == "before_weight":
            return x_dtype
        if self.rounding == "weight_dtype" and weight_dtype in HALF_DTYPES:
            return weight_dtype
        return compute_dtype(x_dtype)

    def output_dtype(self, x_dtype: torch.dtype, weight_dtype: torch.dtype | None) -> torch.dtype:
        """The dtype the layer returns for an input of x_dtype; weight_dtype is None where there is no weight."""
        if self.rounding == "once" or weight_dtype is None:
            return x_dtype
        return _promote(self.hat_dtype(x_dtype, weight_dtype), weight_dtype)

    def to_dict(self) -> dict:
        """Plain values for JSON: ``kind`` and every field."""
        return {"kind": self.kind, **{name: getattr(self, name) for name in self.__dataclass_fields__}}

    def __str__(self) -> str:
        words = [f"eps={self.eps:g}"]
        if not self.has_weight:
            words.append("no weight")
        else:
            words.append({"once": "one rounding", "before_weight": "rounds before weight",
                          "weight_dtype": "rounds to weight's dtype"}[self.rounding])
        if self.weight_offset:
            words.append(f"weight + {self.weight_offset:g}")
        if self.has_bias:
            words.append("bias")
        return f"{self.kind}({', '.join(words)})"

"""How near a module's output must be to a formula's to count as the same.

Two sequences of operators are compared here, in plain torch. What a kernel may differ from
its module is narrower, and another file's: `verification.checks`.
"""

import torch
from torch import Tensor

from ...formula import HALF_DTYPES, NormSpec

EPS32 = 2.0**-23
# The same formula by other primitives. x / sqrt(v) for x * rsqrt(v) is three roundings,
# weight and bias two on either side, each of half an ulp of the summands; in half
# precision few results then lie so near a tie that they round the other way.
MAX_ULPS = 4
MAX_DIFFERING = 8e-3


def close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Whether a is b within `tolerance` times the largest magnitude in b."""
    error = (a.double() - b).abs()
    largest = b.double().abs().amax()
    return bool((error <= tolerance * largest).all())


def nearly(y: Tensor, expected: Tensor, x, weight, bias, spec: NormSpec) -> bool:
    """Whether y is the formula's result but for roundings of float32; in half precision
    few may have been rounded the other way for that.
    """
    if not torch.equal(y.isfinite(), expected.isfinite()):
        return False
    error = (y.double() - expected).abs().nan_to_num()
    magnitudes = expected.double().abs()
    terms = magnitudes.amax(-1, keepdim=True) + _cancelled(x, weight, bias, spec)
    allowed = MAX_ULPS * EPS32 * terms.nan_to_num()
    is_off = error > allowed
    halves = [dtype for dtype in (x.dtype, y.dtype) if dtype in HALF_DTYPES]
    if not halves:
        return not is_off.any()
    if is_off.sum() > max(2, MAX_DIFFERING * error.numel()):
        return False
    info = torch.finfo(halves[0])
    magnitudes = magnitudes.clamp_min(info.tiny).nan_to_num()
    one_step = 2 * info.eps * magnitudes
    return bool((error <= one_step + allowed).all())


def _cancelled(x, weight, bias, spec: NormSpec) -> Tensor | float:
    """The largest terms of a row's sums that may be much larger than its result."""
    terms = 0.0
    if bias is not None:
        terms = bias.double().abs().amax()
    if spec.centered:
        scale = 1.0
        if weight is not None:
            scale = (weight.double() + spec.weight_offset).abs().amax()
        variance, mean = torch.var_mean(x.double(), -1, unbiased=False, keepdim=True)
        root = (variance + spec.eps).sqrt()
        terms = terms + scale * mean.abs() / root
    return terms

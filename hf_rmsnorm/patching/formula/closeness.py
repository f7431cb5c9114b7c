"""How near a module's output must be to a formula's to count as the same."""

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


def nearly(y: Tensor, expected: Tensor, x, bias, spec: NormSpec) -> bool:
    """Whether y is the formula's result but for roundings of float32, measured against
    the largest terms that were summed in a row.
    """
    if not torch.equal(y.isfinite(), expected.isfinite()):
        return False
    expected = expected.double()
    error = (y.double() - expected).abs().nan_to_num()
    magnitudes = expected.abs()
    terms = magnitudes.amax(-1, keepdim=True)
    if bias is not None:
        terms = terms + bias.double().abs().amax()
    if spec.centered:
        # the mean of a row may be much larger than the deviations from it
        x64 = x.double()
        variance, mean = torch.var_mean(x64, -1, unbiased=False, keepdim=True)
        root = (variance + spec.eps).sqrt()
        terms = terms * (1.0 + mean.abs() / root)
    allowed = MAX_ULPS * EPS32 * terms.nan_to_num()
    is_off = error > allowed
    halves = [dtype for dtype in (x.dtype, y.dtype) if dtype in HALF_DTYPES]
    if not halves:
        return not is_off.any()
    info = torch.finfo(halves[0])
    magnitudes = magnitudes.clamp_min(info.tiny).nan_to_num()
    allowed = 2 * info.eps * magnitudes + allowed
    most = max(2, MAX_DIFFERING * error.numel())
    return bool((error <= allowed).all()) and is_off.sum().item() <= most

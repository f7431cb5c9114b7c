"""How near a module's output must be to a formula's to count as the same."""

import torch

from ...formula import HALF_DTYPES, NormSpec

EPS32 = 2.0**-23
# The same formula by other primitives. x / sqrt(v) for x * rsqrt(v) is three roundings,
# weight and bias two on either side, each of half an ulp of the summands; in half
# precision few results then lie so near a tie that they round the other way.
MAX_ULPS = 4
MAX_DIFFERING = 8e-3


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    """Whether a is b within `tolerance` times the largest magnitude in b."""
    error = (a.double() - b).abs()
    largest = b.double().abs().amax()
    return bool((error <= tolerance * largest).all())


def affine(
    hat, y, tensors: dict[str, torch.Tensor], tolerance: float
) -> tuple[str | None, str | None, float] | None:
    """(weight, bias, offset) with which ``hat * (offset + weight) + bias`` is close to
    y: names of tensors, or None.
    """
    weights = [(None, 0.0)]
    for name in tensors:
        weights += [(name, 0.0), (name, 1.0)]
    for weight, offset in weights:
        scaled = hat
        if weight is not None:
            scaled = hat * (tensors[weight].double() + offset)
        if close(scaled, y, tolerance):
            return weight, None, offset
        for bias, tensor in tensors.items():
            if close(scaled + tensor.double(), y, tolerance):
                return weight, bias, offset
    return None


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether dtype and every element are equal, NaN to NaN."""
    if a.dtype != b.dtype:
        return False
    return torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)


def nearly(y: torch.Tensor, expected: torch.Tensor, x, bias, spec: NormSpec) -> bool:
    """Whether y is the formula's result but for roundings of float32, measured against
    the largest terms that were summed in a row.
    """
    if not torch.equal(y.isfinite(), expected.isfinite()):
        return False
    expected = expected.double()
    error = (y.double() - expected).abs().nan_to_num()
    terms = expected.abs().amax(-1, keepdim=True)
    if bias is not None:
        terms = terms + bias.double().abs().amax()
    if spec.centered:
        ratio = _mean_over_root(x.double(), spec.eps)
        terms = terms * (1.0 + ratio)
    allowed = MAX_ULPS * EPS32 * terms.nan_to_num()
    is_off = error > allowed
    halves = {x.dtype, y.dtype} & set(HALF_DTYPES)
    if not halves:
        return not is_off.any()
    info = torch.finfo(halves.pop())
    magnitudes = expected.abs().clamp_min(info.tiny)
    ulps = info.eps * magnitudes.nan_to_num()
    is_far = error > 2 * ulps + allowed
    if is_far.any():
        return False
    most = max(2, MAX_DIFFERING * error.numel())
    return is_off.sum().item() <= most


def _mean_over_root(x: torch.Tensor, eps: float) -> torch.Tensor:
    """How much larger than the deviations from it the mean of each row is."""
    variance, mean = torch.var_mean(x, -1, unbiased=False, keepdim=True)
    root = (variance + eps).sqrt()
    return mean.abs() / root

"""How near a module's output must be to a formula's to count as the same, and names for
near misses.
"""

import itertools

import torch

from ...formula import HALF_DTYPES, NormSpec
from ...reference import in_groups

EPS32 = 2.0**-23
# The same formula by other primitives. x / sqrt(v) for x * rsqrt(v) is three roundings,
# weight and bias two on either side, each of half an ulp; in half precision few results
# then lie so near a tie that they round the other way.
MAX_ULPS = 4
# float16 is eight times finer
MAX_DIFFERING = {torch.bfloat16: 1e-3, torch.float16: 8e-3}


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    """Whether a is b within `tolerance` times the largest magnitude in b."""
    return bool(
        (
            (a.double() - b).abs()
            <= tolerance * b.double().abs().amax().clamp_min(1e-30)
        ).all()
    )


def affine(
    hat, y, tensors: dict[str, torch.Tensor], tolerance: float
) -> tuple[str | None, str | None, float] | None:
    """(weight, bias, offset) with which ``hat * (offset + weight) + bias`` is close to
    y: names of tensors, or None.
    """
    for weight, bias, offset in itertools.product(
        [None, *tensors], [None, *tensors], (0.0, 1.0)
    ):
        if (weight is None and offset) or (bias is not None and bias == weight):
            continue
        scale = 1.0 if weight is None else tensors[weight].double() + offset
        shift = 0.0 if bias is None else tensors[bias].double()
        if close(hat * scale + shift, y, tolerance):
            return weight, bias, offset
    return None


def same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Whether dtype and every element are equal, NaN to NaN and None to None."""
    if a is None or b is None or a.dtype != b.dtype:
        return a is b
    return torch.equal(a, b) or (
        torch.equal(a.isnan(), b.isnan())
        and torch.equal(a.nan_to_num(), b.nan_to_num())
    )


def nearly(y, expected, x, weight, bias, spec: NormSpec) -> bool:
    """Whether y is the formula's result but for roundings of float32, measured against
    the terms that were summed.
    """
    if not torch.equal(y.isfinite(), expected.isfinite()):
        return False
    if spec.group_size is not None:
        y, expected, x, weight, bias = in_groups(
            spec.group_size, y, expected, x, weight, bias
        )
    hat_dtype = spec.hat_dtype(x.dtype, None if weight is None else weight.dtype)
    x = x.double()
    error = (y.double() - expected.double()).abs().nan_to_num()
    terms = expected.double().abs()
    if bias is not None:
        terms = terms + bias.double().abs()
    if spec.weight_offset and weight is not None and spec.gate is None:
        terms = terms.maximum(_terms_of_offset(x, weight, spec))
    noise = _noise_of_mean(x, weight, spec) if spec.centered else torch.zeros(())
    rounded_to = {y.dtype, hat_dtype} & set(HALF_DTYPES)
    if not rounded_to:
        return bool((error <= MAX_ULPS * (EPS32 * terms + noise).nan_to_num()).all())
    half = rounded_to.pop()
    info = torch.finfo(half)
    within = error <= 2 * (info.eps * terms.clamp_min(info.tiny) + noise).nan_to_num()
    return bool(within.all()) and (error > 0).sum().item() <= max(
        2, MAX_DIFFERING[half] * error.numel()
    )


def _terms_of_offset(
    x: torch.Tensor, weight: torch.Tensor, spec: NormSpec
) -> torch.Tensor:
    """The size of the two terms of hat * weight + hat, which may cancel."""
    hat = x - x.mean(-1, keepdim=True) if spec.centered else x
    hat = hat * (hat.pow(2).mean(-1, keepdim=True) + spec.eps).rsqrt()
    return (hat * (weight.double().abs() + spec.weight_offset)).abs()


def _noise_of_mean(
    x: torch.Tensor, weight: torch.Tensor | None, spec: NormSpec
) -> torch.Tensor:
    """By how much a result is off where the mean was summed in another order: by
    roundings of its summands.
    """
    rstd = (x.var(-1, keepdim=True, unbiased=False) + spec.eps).rsqrt()
    scale = 1.0 if weight is None else (weight.double() + spec.weight_offset).abs()
    return EPS32 * x.abs().mean(-1, keepdim=True) * rstd * scale


def describe(
    x: torch.Tensor, y: torch.Tensor, tensors: dict[str, torch.Tensor]
) -> str | None:
    """The name of the look-alike that gives y (..., hidden_size) for rows x so large
    that eps is nothing; or None.
    """
    tensors = {
        name: tensor for name, tensor in tensors.items() if tensor.shape == x.shape[-1:]
    }
    x = x.double()
    centred = x - x.mean(-1, keepdim=True)
    square = x.pow(2).mean(-1, keepdim=True)
    variance = centred.pow(2).mean(-1, keepdim=True)
    unbiased = variance * x.shape[-1] / max(x.shape[-1] - 1, 1)
    variants = {
        "a LayerNorm with the unbiased variance, dividing by n - 1": centred
        * unbiased.rsqrt(),
        "an L2 norm: it divides by the length of the row, without the mean": x
        * x.pow(2).sum(-1, keepdim=True).rsqrt(),
        "a division by the standard deviation without centring": x * variance.rsqrt(),
        "a division by the unbiased standard deviation without centring": x
        * unbiased.rsqrt(),
        "a division by the variance without the root, centred": centred / variance,
        "a division by the variance without the root or centring": x / variance,
        "a division by the mean square without the root": x / square,
        "centring alone": centred,
        "a division by the mean magnitude": x / x.abs().mean(-1, keepdim=True),
        "an affine map": x,
    }
    for name, hat in variants.items():
        if affine(hat, y.double(), tensors, 1e-5):
            return f"it computes {name}"
    return None

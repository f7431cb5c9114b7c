"""The tolerance against float64: the error that Hugging Face eager itself makes."""

import math

import torch

FACTOR = 1.5  # how many times the error of eager a result's may be


def ulp(y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The distance from |y| up to the next number of ``dtype``, as float64, shaped like
    y (any floating dtype).
    """
    info = torch.finfo(dtype)
    # the numbers below the smallest normal one have its distance
    size = y.double().abs().clamp_min(info.smallest_normal)
    # size = m * 2^exponent with 0.5 <= m < 1
    _, exponent = torch.frexp(size)
    power = exponent.double() - 1
    return info.eps * power.exp2()


def within(ours: float, theirs: float, slack: float) -> bool:
    """Whether an error is finite and at most 1.5 times eager's, plus the slack."""
    return math.isfinite(ours) and ours <= FACTOR * theirs + slack

"""The tolerance against float64: the error that Hugging Face eager itself makes."""

import math

import torch

FACTOR = 1.5  # how many times the error of eager a result's may be


def ulp(y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The distance from |y| up to the next number of ``dtype``, as float64, shaped like
    y (any floating dtype).
    """
    info = torch.finfo(dtype)
    # |y| = m * 2^exponent with 0.5 <= m < 1
    _, exponent = torch.frexp(y.double())
    eps = torch.full_like(y, info.eps, dtype=torch.float64)
    step = torch.ldexp(eps, exponent - 1)
    smallest = info.smallest_normal * info.eps
    return torch.where(y == 0, smallest, step.clamp_min(smallest))


def within(ours: float, theirs: float, slack: float) -> bool:
    """Whether an error is finite and at most 1.5 times eager's, plus the slack."""
    return math.isfinite(ours) and ours <= FACTOR * theirs + slack

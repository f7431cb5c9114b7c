"""The one tolerance policy: a result is judged against float64, by the error that Hugging Face eager itself makes."""

import math

import torch

FACTOR = 1.5  # how many times the error of eager a result's may be


def ulp(y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The distance from |y| up to the next number of ``dtype``, as float64, shaped like y (any floating dtype)."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(y.double().abs())  # |y| = m * 2^exponent with 0.5 <= m < 1
    step = torch.ldexp(torch.full_like(y, info.eps, dtype=torch.float64), exponent - 1)
    smallest = info.smallest_normal * info.eps
    return torch.where(y == 0, smallest, step.clamp_min(smallest))


def within(ours: float, theirs: float, slack: float) -> bool:
    """Whether an error is finite and at most 1.5 times eager's, plus the slack."""
    return math.isfinite(ours) and ours <= FACTOR * theirs + slack


def assert_as_accurate(
    fused: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, what: str = "y", other_orders: tuple = ()
) -> None:
    """Maximum and RMS error of `fused` at most 1.5 times those of `eager`, plus one ulp of max|exact|.

    `other_orders`: for a sum over rows, eager's result with the rows in other orders. Which order adds up best is
    luck, so eager's own error is the largest of them.
    """
    assert fused.shape == exact.shape, f"{what}: shape {tuple(fused.shape)}, expected {tuple(exact.shape)}"
    assert fused.dtype == eager.dtype, f"{what}: {fused.dtype}, eager gives {eager.dtype}"
    if exact.numel() == 0:
        return
    one_ulp = ulp(exact.abs().max(), fused.dtype).item()
    errors = {
        "max": lambda t: (t.double() - exact).abs().max().item(),
        "rms": lambda t: (t.double() - exact).square().mean().sqrt().item(),
    }
    for name, error in errors.items():
        ours, theirs = error(fused), max(error(t) for t in (eager, *other_orders))
        assert ours <= FACTOR * theirs + one_ulp, (
            f"{what}: {name} error {ours:.3e} against float64, eager's is {theirs:.3e} and one ulp {one_ulp:.3e}"
        )

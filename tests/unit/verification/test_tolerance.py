"""The one tolerance policy."""

import math

import pytest
import torch

from benchmarks.tolerance import assert_as_accurate
from hf_rmsnorm.verification.tolerance import FACTOR, ulp


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_ulp_is_the_distance_to_the_next_number(dtype):
    y = torch.tensor([1.0, 1.5, 1.9375, 2.0, -3.0, 1000.0, 2.0**-10, 0.0], dtype=dtype)
    above = torch.nextafter(y.abs(), torch.full_like(y, math.inf))
    torch.testing.assert_close(
        ulp(y, dtype), above.double() - y.abs().double(), rtol=0, atol=0
    )


def test_a_result_may_have_one_and_a_half_times_the_error_of_eager_and_one_ulp():
    exact = torch.linspace(-1.0, 1.0, 64, dtype=torch.float64)
    eager = exact.float() + 1e-3
    largest = exact.abs().max()
    one_ulp = ulp(largest, torch.float32).item()
    assert_as_accurate((exact + FACTOR * 1e-3 + one_ulp / 2).float(), eager, exact)
    with pytest.raises(AssertionError, match="max error"):
        assert_as_accurate((exact + FACTOR * 1.01e-3).float(), eager, exact)
    far = eager.clone()
    far[::2] += 0.4e-3  # none too far, but too many
    with pytest.raises(AssertionError, match="rms error"):
        assert_as_accurate(
            far, torch.where(torch.arange(64) == 0, eager, exact.float()), exact
        )
    with pytest.raises(AssertionError, match="eager gives"):
        assert_as_accurate(eager.double(), eager, exact)

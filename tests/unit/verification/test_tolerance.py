"""The one tolerance policy."""

import math

import pytest
import torch

from benchmarks.tolerance import assert_as_accurate
from hf_rmsnorm.verification.tolerance import FACTOR, ulp

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
def test_ulp_is_the_distance_to_the_next_number(dtype):
    values = [1.0, 1.5, 1.9375, 2.0, -3.0, 1000.0, 2.0**-10, 0.0]
    y = torch.tensor(values, dtype=dtype)
    infinity = torch.full_like(y, math.inf)
    size = y.abs()
    above = torch.nextafter(size, infinity)
    distance = above.double() - size.double()
    assert torch.equal(ulp(y, dtype), distance)


def test_a_result_may_have_one_and_a_half_times_the_error_of_eager_and_one_ulp():
    exact = torch.linspace(-1.0, 1.0, 64).double()
    eager = exact.float() + 1e-3
    one_ulp = ulp(exact.max(), torch.float32)
    bound = exact + FACTOR * 1e-3
    inside = bound + one_ulp / 2
    assert_as_accurate(inside.float(), eager, exact)
    outside = bound + 1e-5
    with pytest.raises(AssertionError, match="max error"):
        assert_as_accurate(outside.float(), eager, exact)
    with pytest.raises(AssertionError, match="eager gives"):
        assert_as_accurate(eager.double(), eager, exact)


def test_many_errors_that_eager_has_in_one_place_are_too_many():
    exact = torch.linspace(-1.0, 1.0, 64).double()
    eager = exact.float()
    eager[0] += 1e-3
    fused = exact.float()
    fused += 1e-3
    with pytest.raises(AssertionError, match="rms error"):
        assert_as_accurate(fused, eager, exact)

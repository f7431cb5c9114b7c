"""The tolerance policy of the tests is the one by which the benchmarks judge every implementation."""

from hf_rmsnorm.verification.tolerance import FACTOR, assert_as_accurate, ulp

__all__ = ["FACTOR", "assert_as_accurate", "ulp"]

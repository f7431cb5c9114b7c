"""The tolerance policy of the tests is the one by which the benchmarks judge every
implementation.
"""

from benchmarks.tolerance import assert_as_accurate
from hf_rmsnorm.verification.tolerance import FACTOR, ulp

__all__ = ["FACTOR", "assert_as_accurate", "ulp"]

"""A sample of the executed tests, compiled for older chips; ``.ci/nightly`` runs all of
them for sm_75.

A T4 and a V100 round to bfloat16 in integers and copy nothing ahead. So their code is
another than sm_90's.
"""

import os

import pytest
from processes import python

from benchmarks.ptx.driver import CHIP

SAMPLE = (
    # Norms forward and backward, q and k forward. It looks at the PTX, which names the
    # chip.
    "tests/ptx/test_bits.py::test_nothing_is_left_for_the_assembler_to_contract",
    "tests/ptx/test_bits.py::test_norms_have_the_bits_of_eager[llama-dtype0]",
    "tests/unit/kernels/test_batch_invariance.py::test_a_residual_sum_and_its_norm[RMSNorm-96]",
    "tests/unit/kernels/test_qk_forward.py::test_backward_of_every_formula[qwen3--32-dtypes1]",
)


@pytest.mark.full
@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("chip", ["75", "70"])
def test_a_sample_passes_there(chip):
    run = ("-m", "pytest", "-q", "-p", "no:cacheprovider", *SAMPLE)
    interpret = {"TRITON_INTERPRET": os.environ["TRITON_INTERPRET"]}
    assert f"{len(SAMPLE)} passed" in python(*run, **{CHIP: chip}, **interpret)

"""examples/generate.py does what it says, run as a user runs it."""

import pytest
from places import EXAMPLES
from processes import python

pytestmark = pytest.mark.full


def test_generate_says_the_same_before_and_after_and_proves_it(tmp_path):
    text = python(
        EXAMPLES / "generate.py",
        "--prompt",
        "The",
        "--max-new-tokens",
        "4",
        cwd=tmp_path,
        OMP_NUM_THREADS="1",
        ACCELERATE_USE_CPU="true",
    )
    assert "model.layers.[0-4].input_layernorm" in text and "RMSNorm(" in text
    _, text = text.split("--- before the patch\n")
    before, text = text.split("--- after the patch\n")
    after, proof = text.split("--- equivalence")
    assert before.strip() == after.strip() != ""
    assert "the tokens are equal" in proof
    assert "PASS" in proof
    assert "FAIL" not in proof

"""examples/generate.py does what it says, run as a user runs it. (finetune.py:
test_finetune_launched.py)
"""

import os
import subprocess
import sys

import pytest
from places import ROOT

pytestmark = pytest.mark.full


def output(cwd, *argv) -> str:
    base = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *map(str, argv)],
        cwd=cwd,
        env=base
        | {
            "OMP_NUM_THREADS": "1",
            "ACCELERATE_USE_CPU": "true",
            "PYTHONPATH": str(ROOT),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_generate_says_the_same_before_and_after_and_proves_it(tmp_path):
    text = output(tmp_path, ROOT / "examples" / "generate.py", "--max-new-tokens", "6")
    assert "model.layers.[0-4].input_layernorm" in text and "RMSNorm(" in text
    before, after = text.split("--- before the patch\n")[1].split(
        "--- after the patch\n"
    )
    assert before.strip() == after.split("--- equivalence")[0].strip() != ""
    assert "the tokens are equal" in text and "FAIL" not in text and "PASS" in text
    assert "interpreter" in text or "compiles" in text

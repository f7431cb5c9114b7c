"""A trained model, patched, is the model it was: logits, norms and greedy tokens."""

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_rmsnorm import verify_equivalence
from hf_rmsnorm.demo import DEMO_MODELS, demo_path

TEXT = "The function returns"


@pytest.mark.full
@pytest.mark.parametrize("name", DEMO_MODELS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_patched_model_is_equivalent(name, dtype):
    path = demo_path(name)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    inputs = AutoTokenizer.from_pretrained(path)(TEXT, return_tensors="pt").input_ids
    report = verify_equivalence(model, inputs=inputs, max_new_tokens=4)
    assert report.passed and not report.greedy.differing, f"\n{report}"
    assert report.launches, "no kernel ran, so nothing was proven"
    assert report.norms and all(norm.compared for norm in report.norms)

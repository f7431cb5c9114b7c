"""A trained model, patched, is the model it was: logits, norms and greedy tokens.

By default on the embedded models in float32 and bfloat16, with Triton's interpreter
where there is no GPU. On a checkpoint of your own, in its own dtype and in float32::

    pytest tests/promises/generation/test_logit_equivalence.py --model PATH_OR_ID
"""

import gc

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_rmsnorm import verify_equivalence
from hf_rmsnorm.demo import DEMO_MODELS, demo_path

pytestmark = pytest.mark.full

TEXT = "The function returns a list of the names that are defined in the module, sorted in alphabetical order."
TOKENS = 32
DEVICE = torch.accelerator.current_accelerator(check_available=True) or torch.device(
    "cpu"
)


def pytest_generate_tests(metafunc):
    given = metafunc.config.getoption("--model")
    sources = [given] if given else [f"demo:{name}" for name in DEMO_MODELS]
    dtypes = ["auto" if given else "bfloat16", "float32"]
    metafunc.parametrize("source", sources)
    metafunc.parametrize("dtype", dtypes)


def test_patched_model_is_equivalent(source, dtype):
    where = (
        demo_path(source.removeprefix("demo:"))
        if source.startswith("demo:")
        else source
    )
    model = AutoModelForCausalLM.from_pretrained(where, dtype=dtype).to(DEVICE)
    inputs = AutoTokenizer.from_pretrained(where)(TEXT, return_tensors="pt").input_ids[
        :, :TOKENS
    ]
    report = verify_equivalence(
        model, inputs=inputs, max_new_tokens=8, rows_per_norm=32
    )
    print(report)
    assert report.passed, f"\n{report}"
    assert report.launches, f"no kernel ran, so nothing was proven\n{report}"
    assert report.norms and all(norm.elements for norm in report.norms), (
        f"a norm was not compared\n{report}"
    )
    if source.startswith("demo:"):
        assert report.greedy.equal
    del model
    gc.collect()

"""Whole models on real hardware: tokens, training, compilation, caches and offloading.
How to run: tests/gpu.py.
"""

import pytest
import torch
from gpu import BF16, DEVICE, FP16, FP32, GPU, gpu_tests, real_gpu
from tiny_models import gradients
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_rmsnorm import count_launches, patched, verify_equivalence
from hf_rmsnorm.demo import DEMO_MODELS, demo_path

pytestmark = gpu_tests

PROMPT = "The licence of this software permits"


def demo(name, dtype):
    """An embedded trained model on the device, in eval mode, and a prompt."""
    path = demo_path(name)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    model = model.to(DEVICE).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids.to(DEVICE)
    return model, ids if GPU else ids[:, :6]


def generate(model, ids, **options):
    options |= {"max_new_tokens": 64 if GPU else 2, "do_sample": False}
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return out[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16] if GPU else [BF16])
@pytest.mark.parametrize("name", DEMO_MODELS)
def test_trained_models_generate_the_same_tokens(name, dtype):
    model, ids = demo(name, dtype)
    expected = generate(model, ids)
    with patched(model), count_launches() as launches:
        assert generate(model, ids) == expected
    assert launches
    assert generate(model, ids) == expected


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16] if GPU else [BF16])
@pytest.mark.parametrize("name", DEMO_MODELS if GPU else ["llama"])
def test_trained_models_are_proven_equal(name, dtype):
    model, ids = demo(name, dtype)
    report = verify_equivalence(model, inputs=ids, max_new_tokens=16 if GPU else 2)
    assert report.norms, "no norm was compared"
    assert report.passed, str(report)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=real_gpu)])
def test_static_cache_generates_the_same_tokens(compiled):
    # With a static cache `generate` compiles the decoding step and records it as CUDA
    # graphs, unless told not to.
    torch._dynamo.reset()
    model, ids = demo("llama", FP32)
    expected = generate(model, ids)
    how = {"cache_implementation": "static", "disable_compile": not compiled}
    with patched(model):
        assert generate(model, ids, **how) == expected


def train(model, ids):
    model.zero_grad(set_to_none=True)
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.item(), gradients(model)


def test_training_step_on_the_gpu():
    model, ids = demo("qwen3", FP32)
    loss, expected = train(model, ids.repeat(2, 1))
    with patched(model):
        got, grads = train(model, ids.repeat(2, 1))
    assert got == pytest.approx(loss, rel=1e-5)
    for name, right in expected.items():
        difference = (grads[name] - right).norm()
        assert difference <= 1e-4 * right.norm(), f"gradient of {name}"

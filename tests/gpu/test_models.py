"""Whole models on real hardware: tokens, training, compilation, caches and offloading.
How to run: tests/helpers/gpu.py.
"""

import pytest
import torch
from gpu import BF16, DEVICE, FP16, FP32, GPU, gpu_tests, real_gpu
from tiny_models import gradients
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_rmsnorm import patched, verify_equivalence
from hf_rmsnorm.demo import DEMO_MODELS, demo_path

pytestmark = gpu_tests
parametrize = pytest.mark.parametrize

PROMPT = "The licence of this software permits"
DTYPES = [BF16]
COMPARED = ["llama"]
if GPU:
    DTYPES = [FP32, BF16, FP16]
    COMPARED = DEMO_MODELS


def demo(name, dtype):
    """An embedded trained model on the device, in eval mode, and a prompt."""
    path = demo_path(name)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    model = model.to(DEVICE).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    batch = tokenizer(PROMPT, return_tensors="pt")
    ids = batch.input_ids.to(DEVICE)
    if not GPU:
        ids = ids[:, :6]
    return model, ids


def generate(model, ids, **options):
    new_tokens = 2
    if GPU:
        new_tokens = 64
    options |= {"max_new_tokens": new_tokens, "do_sample": False}
    mask = torch.ones_like(ids)
    with torch.no_grad():
        out = model.generate(ids, attention_mask=mask, **options)
    prompt_length = ids.shape[1]
    return out[0, prompt_length:].tolist()


@parametrize("dtype", DTYPES)
@parametrize("name", COMPARED)
def test_trained_models_are_proven_equal(name, dtype):
    model, ids = demo(name, dtype)
    new_tokens = 2
    if GPU:
        new_tokens = 16
    report = verify_equivalence(model, inputs=ids, max_new_tokens=new_tokens)
    assert report.norms, "no norm was compared"
    assert report.passed, str(report)


@parametrize("compiled", [False, pytest.param(True, marks=real_gpu)])
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
    batch = ids.repeat(2, 1)
    loss, expected = train(model, batch)
    with patched(model):
        got, grads = train(model, batch)
    assert got == pytest.approx(loss, rel=1e-5)
    for name, right in expected.items():
        difference = grads[name] - right
        allowed = 1e-4 * right.norm()
        assert difference.norm() <= allowed, f"gradient of {name}"

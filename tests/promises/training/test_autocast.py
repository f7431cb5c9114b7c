"""Float32 weights under autocast, the commonest fine-tuning of all: as much is fused as
without, and the same bits.
"""

import copy

import pytest
import tiny_models
import torch
from fusion_models import IDS
from tolerance import assert_as_accurate

from hf_rmsnorm import count_launches, patch_model, use_backend

FAMILIES = ["llama", "qwen3", "gemma3_text", "gpt2", "phi3", "mixtral"]


def step(model, dtype, backend="triton"):
    """(launches, hidden states and loss, gradients by name) of one training step."""
    model.zero_grad()
    with use_backend(backend), count_launches() as launches:
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            output = model(IDS, labels=IDS, output_hidden_states=True, use_cache=False)
        output.loss.backward()
    gradients = {
        name: p.grad.clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    return launches, [*output.hidden_states, output.loss], gradients


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_training_under_autocast_launches_what_plain_training_launches(family, dtype):
    model = tiny_models.build(family)
    patch_model(model)
    plain, _, _ = step(model, None)
    launches, found, gradients = step(model, dtype)
    assert launches == plain
    patch_model(model, fuse_residual=False)
    more, expected, alone = step(model, dtype)
    assert sum(more.values()) >= sum(launches.values())
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), (
        "fused is what the norms alone are"
    )
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            gradient, alone[name], rtol=0.02, atol=0.02 * alone[name].abs().max().item()
        )


def distance(gradients, exact):
    squares = [
        (gradients[name].double() - exact[name]).square().sum() for name in exact
    ]
    return torch.stack(squares).sum().sqrt()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_gradients_under_autocast_are_as_near_to_float64_as_the_unpatched_models(
    family,
):
    model = tiny_models.build(family)
    exact = copy.deepcopy(model).double()
    exact(IDS, labels=IDS, use_cache=False).loss.backward()
    exact = {name: p.grad for name, p in exact.named_parameters()}
    _, _, eager = step(model, torch.bfloat16)
    patch_model(model)
    _, _, ours = step(model, torch.bfloat16)
    assert distance(ours, exact) <= 1.5 * distance(eager, exact)
    last = "transformer.ln_f.weight" if family == "gpt2" else "model.norm.weight"
    assert_as_accurate(ours[last], eager[last], exact[last])


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_generation_under_autocast(family):
    model = tiny_models.build(family).eval()
    how = {"max_new_tokens": 6, "do_sample": False}
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model.generate(IDS[:1, :8], **how)
        patch_model(model)
        with use_backend("triton"), count_launches() as launches:
            assert torch.equal(model.generate(IDS[:1, :8], **how), expected)
    # of two layers: sums with norms, and one launch for q and k
    norms = {"llama": 5, "qwen3": 7}[family]
    assert sum(launches.values()) == 6 * norms, launches

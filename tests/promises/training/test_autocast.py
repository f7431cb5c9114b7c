"""Float32 weights under autocast, the commonest fine-tuning of all: as much is fused as
without, and the same bits.
"""

import copy

import pytest
import tiny_models
import torch
from tolerance import assert_as_accurate

from hf_rmsnorm import count_launches, patch_model, use_backend

IDS = tiny_models.token_ids(1, 8)
FAMILIES = ["qwen3", "gemma3_text", "gpt2", "mixtral"]


def step(model, dtype, backend="triton"):
    """(launches, hidden states and loss, gradients by name) of one training step."""
    model.zero_grad()
    with use_backend(backend), count_launches() as launches:
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            output = model(IDS, labels=IDS, output_hidden_states=True)
        output.loss.backward()
    states = [*output.hidden_states, output.loss]
    return launches, states, tiny_models.gradients(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_training_under_autocast_launches_what_plain_training_launches(family, dtype):
    model = tiny_models.build(family)
    patch_model(model)
    plain, _, _ = step(model, None)
    launches, states, gradients = step(model, dtype)
    assert launches == plain
    patch_model(model, fuse_residual=False)
    more, expected, alone = step(model, dtype)
    assert more.total() >= launches.total()
    assert all(map(torch.equal, states, expected)), "fused is what the norms alone are"
    for name, gradient in gradients.items():
        size = alone[name].abs().max().item()
        torch.testing.assert_close(gradient, alone[name], rtol=0.02, atol=0.02 * size)


def distance(gradients, exact):
    squares = 0.0
    for name, right in exact.items():
        error = gradients[name].double() - right
        squares += error.square().sum().item()
    return squares**0.5


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_gradients_under_autocast_are_as_near_to_float64_as_the_unpatched_models(
    family,
):
    model = tiny_models.build(family)
    _, _, exact = step(copy.deepcopy(model).double(), None)
    _, _, eager = step(model, torch.bfloat16)
    patch_model(model)
    _, _, ours = step(model, torch.bfloat16)
    assert distance(ours, exact) <= 1.5 * distance(eager, exact)
    last = "transformer.ln_f.weight" if family == "gpt2" else "model.norm.weight"
    assert_as_accurate(ours[last], eager[last], exact[last])

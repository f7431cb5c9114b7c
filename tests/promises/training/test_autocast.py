"""Float32 weights under autocast, the commonest fine-tuning of all: as much is fused as
without, and the same bits.
"""

import copy

import pytest
import tiny_models
import torch
from parallel_runs import rms_error
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
    rotations = launches["rotary_forward"] + launches["rotary_backward"]
    assert more.total() >= launches.total() - rotations
    # fused is what the norms alone are
    torch.testing.assert_close(states, expected, rtol=0, atol=0)
    for name, gradient in alone.items():
        largest = gradient.abs().max().item()
        atol = 0.02 * largest
        torch.testing.assert_close(gradients[name], gradient, rtol=0.02, atol=atol)


LAST = {"qwen3": "model.norm.weight", "gpt2": "transformer.ln_f.weight"}


@pytest.mark.parametrize("family", LAST)
def test_gradients_under_autocast_are_as_near_to_float64_as_the_unpatched_models(
    family,
):
    model = tiny_models.build(family)
    _, _, exact = step(copy.deepcopy(model).double(), None)
    _, _, eager = step(model, torch.bfloat16)
    patch_model(model)
    _, _, ours = step(model, torch.bfloat16)
    assert rms_error(ours, exact) <= 1.5 * rms_error(eager, exact)
    last = LAST[family]
    assert_as_accurate(ours[last], eager[last], exact[last])

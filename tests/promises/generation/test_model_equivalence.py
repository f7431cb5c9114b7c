"""Patched models against unpatched ones: logits, loss, gradients and greedy text, with
the kernels really running.
"""

import pytest
import tiny_models
import torch
from tolerance import assert_as_accurate
from torch.nn.functional import cross_entropy

from hf_rmsnorm import count_launches, patch_model, unpatch_model, use_backend

FAMILIES = ["llama", "qwen3", "gemma3_text", "gpt2"]


def training_step(model, ids):
    model.zero_grad()
    logits = model(ids, use_cache=False).logits
    predicted = logits[:, :-1].flatten(0, 1).float()
    loss = cross_entropy(predicted, ids[:, 1:].flatten())
    loss.backward()
    return logits.detach(), loss.detach(), tiny_models.gradients(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_loss_and_gradients(family):
    """float32: the fused run is as near to float64 as the eager run is."""
    model = tiny_models.build(family)
    ids = tiny_models.token_ids(2, 8)
    eager = training_step(model, ids)
    exact_model = tiny_models.build(family)
    # `double` first, so that the exact run has no float32 parameter left; a norm's own
    # float32 cast stays and bounds what can be asked of the comparison to the size of
    # eager's own error.
    exact = training_step(exact_model.double(), ids)
    patch_model(model)
    with use_backend("triton"), count_launches() as launches:
        fused = training_step(model, ids)
    assert launches["norm_backward"] == launches["norm_forward"] > 0
    assert launches["qk_norm_backward"] == launches["qk_norm_forward"]
    logits, loss, gradients = fused
    eager_logits, eager_loss, expected = eager
    assert_as_accurate(logits, eager_logits, exact[0], "logits")
    torch.testing.assert_close(loss, eager_loss, rtol=1e-6, atol=0)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        close = 4e-6 * gradient.abs().max().item() + 1e-9
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=close)


@pytest.mark.parametrize("family", FAMILIES)
def test_reference_backend_is_bit_equal_in_bfloat16(family):
    model = tiny_models.build(family, dtype=torch.bfloat16)
    ids = tiny_models.token_ids(2, 8)
    eager = training_step(model, ids)
    patch_model(model)
    with use_backend("reference"):
        formula = training_step(model, ids)
    unpatch_model(model)
    restored = training_step(model, ids)
    torch.testing.assert_close(formula, eager, rtol=0, atol=0)
    torch.testing.assert_close(restored, eager, rtol=0, atol=0)

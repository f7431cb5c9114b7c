"""Sums of a few elements are fused as large ones are, and training by checkpoints is as without."""

import copy
from functools import partial

import pytest
import torch
from fusion_models import IDS, build
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from hf_rmsnorm import count_launches, patch_model, use_backend, verify_equivalence

NORMS, SUMS = 7, 3  # of a LLaMA of three layers; one norm of each reads a sum of its layer


def patched():
    model = build("llama")
    patch_model(model)
    return model


def test_one_token_adds_and_normalises_in_one_launch(fused_sums):
    model = patched()
    with torch.no_grad(), use_backend("triton"), count_launches() as launches:
        model(IDS[:1, :1])
    assert len(fused_sums) == SUMS and launches["norm_forward"] == NORMS


def test_verification_compares_the_fused_sums():
    report = verify_equivalence(copy.deepcopy(build("llama")), inputs=IDS[:, :4], max_new_tokens=1, backend="triton")
    assert report.passed and sum(": + post_attention_layernorm" in check.path for check in report.fused) == SUMS


SELECTIVE = partial(create_selective_checkpoint_contexts, [torch.ops.aten.add.Tensor])  # sums are kept
CHECKPOINTS = {
    "reentrant": {"use_reentrant": True}, "not reentrant": {"use_reentrant": False},
    "selective": {"use_reentrant": False, "context_fn": SELECTIVE},
}  # fmt: skip


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_checkpointed_layers_train_from_the_first_step_on(kind):
    """Both runs of a layer are alike: a checkpoint gives the second what the first has kept, in order."""
    model = patched().train()
    expected = torch.autograd.grad(model(IDS).logits.sum(), [*model.parameters()])
    model.gradient_checkpointing_enable(CHECKPOINTS[kind])
    for _ in range(2):
        model.zero_grad()
        model(IDS).logits.sum().backward()
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)

"""Models that another patcher has been at: said in the report, and left to it."""

import pytest
import tiny_models
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_rmsnorm import patch_model, unpatch_model, use_backend

ids = tiny_models.token_ids()


class HubRMSNorm(nn.Module):
    """A kernel layer as the Hub's hold them: no constructor and no state, its forward
    runs on another's parameters.
    """

    def forward(self, x):
        size = self.weight.shape
        eps = self.variance_epsilon
        return nn.functional.rms_norm(x, size, self.weight, eps)


def kernelize(model):
    """What `kernels.kernelize` does under ``use_kernels=True``, and again at every
    ``train()`` and ``eval()``; Liger's patch of a model does the like.
    """
    for module in model.modules():
        if isinstance(module, LlamaRMSNorm):
            module.forward = HubRMSNorm.forward.__get__(module)


@pytest.mark.parametrize("patched_first", [False, True])
def test_the_other_patcher_runs_whichever_came_first(patched_first, fused_calls):
    """`use_kernels` comes back at every train() and eval(): the last one runs, and none
    is undone.
    """
    plain = tiny_models.build("llama")
    model = tiny_models.build("llama")
    if patched_first:
        patch_model(model)
    kernelize(plain)
    kernelize(model)
    expected = plain(ids).logits

    def assert_left_to_the_other():
        with use_backend("reference"):
            assert torch.equal(model(ids).logits, expected)
        assert not fused_calls

    assert_left_to_the_other()
    with pytest.warns(UserWarning, match="changed no norm"):
        report = patch_model(model)
    assert not report.swapped
    assert len(report.skipped) == 5
    for record in report.skipped:
        assert record.class_name == "LlamaRMSNorm"
        assert "replaced on the instance by" in record.reason
        assert "HubRMSNorm.forward" in record.reason
    message = "5 of the norms cannot be swapped.*HubRMSNorm"
    with pytest.raises(ValueError, match=message):
        patch_model(model, strict=True)
    assert_left_to_the_other()
    assert unpatch_model(model) == 5 * patched_first
    assert_left_to_the_other()
    assert not tiny_models.fused_norms(model)

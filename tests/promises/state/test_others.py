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


def test_a_model_of_another_patcher_is_named_and_left_alone(fused_calls):
    model = tiny_models.build("llama")
    kernelize(model)
    attributes = [dict(vars(module)) for module in model.modules()]
    expected = model(ids).logits
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
    assert [vars(module) for module in model.modules()] == attributes
    with use_backend("reference"):
        assert torch.equal(model(ids).logits, expected)
    assert not fused_calls and unpatch_model(model) == 0


def test_a_patcher_that_comes_later_wins_and_is_reported(fused_calls):
    """`use_kernels` comes back at every train() and eval(): the last one runs, and none
    is undone.
    """
    plain = tiny_models.build("llama")
    model = tiny_models.build("llama")
    patch_model(model)
    kernelize(plain), kernelize(model)
    expected = plain(ids).logits
    with use_backend("reference"):
        assert torch.equal(model(ids).logits, expected)
    assert not fused_calls
    with pytest.warns(UserWarning, match="changed no norm"):
        report = patch_model(model)
    assert len(report.skipped) == 5
    assert all("HubRMSNorm.forward" in r.reason for r in report.skipped)
    assert unpatch_model(model) == 5
    assert torch.equal(model(ids).logits, expected), "the other patch stays"
    assert not tiny_models.fused_norms(model)

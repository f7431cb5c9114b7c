"""Models that write in place to what a norm has read: in half precision an error names
the norm, and `exclude` cures it.
"""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_rmsnorm import patch_model, unpatch_model, use_backend


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = LlamaRMSNorm(64)
        self.linear = nn.Linear(64, 64)


class AddsApart(Base):
    def forward(self, x):
        return x + self.linear(self.norm(x))


class ParentWrites(nn.Module):
    """The module that holds the norm does not write; the one that calls it does."""

    class Block(Base):
        def forward(self, hidden):
            return self.linear(self.norm(hidden))

    def __init__(self):
        super().__init__()
        self.block = self.Block()

    def forward(self, x):
        x += self.block(hidden=x)
        return x


class WritesBefore(Base):
    """Written to before the norm reads it: nothing is lost."""

    def forward(self, x):
        x = x * 1
        x += 1
        return x + self.linear(self.norm(x))


def train(model, dtype):
    x = torch.randn(2, 5, 64).to(dtype)
    return model.to(dtype).train(), x.requires_grad_()


def step(model, x):
    with use_backend("triton"):
        model(x * 1).float().square().sum().backward()


def test_a_write_is_an_error_that_exclude_cures():
    layers = nn.Sequential(ParentWrites(), AddsApart(), ParentWrites())
    model, x = train(layers, torch.bfloat16)
    patch_model(model)
    with pytest.raises(RuntimeError) as error:
        step(model, x)
    message = str(error.value)
    assert message.startswith("'2.block.norm': what this norm keeps for its backward")
    assert "patch_model(model, exclude=['2.block.norm'])" in message
    assert "modified by an inplace operation" in str(error.value.__cause__)
    patch_model(model, exclude=["2.block.norm", "0.*"])
    step(model, x)


def checkpointed(model, x):
    with use_backend("triton"):
        y = checkpoint(lambda x: model(x * 1), x, use_reentrant=False)
    y.float().sum().backward()


def test_such_a_write_is_an_error_under_checkpointing_too():
    """Whose hooks keep autograd from looking for it. The last write of all is not run
    again, and does no harm.
    """
    layers = nn.Sequential(ParentWrites(), ParentWrites())
    model, x = train(layers, torch.bfloat16)
    patch_model(model)
    with pytest.raises(RuntimeError, match="^'0.block.norm': what this norm keeps"):
        checkpointed(model, x)
    for cls in (AddsApart, WritesBefore, ParentWrites):
        model, x = train(nn.Sequential(AddsApart(), cls()), torch.bfloat16)
        patch_model(model)
        checkpointed(model, x)


def same(t):
    return t


@pytest.mark.parametrize("pack", [torch.clone, same])
def test_such_a_write_is_an_error_under_hooks_that_keep_no_copy(pack):
    model, x = train(nn.Sequential(ParentWrites()), torch.bfloat16)
    patch_model(model)
    with torch.autograd.graph.saved_tensors_hooks(pack, same):
        if pack is same:
            with pytest.raises(RuntimeError, match="^'0.block.norm': what"):
                step(model, x)
        else:
            step(model, x)


def test_where_no_weight_tells_which_norm_it_is_all_are_named():
    layers = nn.Sequential(ParentWrites(), ParentWrites())
    for layer in layers:
        layer.block.norm = nn.RMSNorm(64, elementwise_affine=False)
    model, x = train(layers, torch.bfloat16)
    patch_model(model)
    with pytest.raises(RuntimeError, match="^'0.block.norm', '1.block.norm': what"):
        step(model, x)
    other = copy.deepcopy(model)
    del layers, layer, model
    gc.collect()
    with pytest.raises(RuntimeError, match="^a norm: what"):
        step(other, x)


def test_another_error_of_a_backward_is_torchs_own():
    model, x = train(AddsApart(), torch.bfloat16)
    patch_model(model)
    with use_backend("triton"):
        loss = model(x).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time") as error:
        loss.backward()
    assert error.value.__cause__ is None


def test_float32_fails_as_unpatched():
    model, x = train(ParentWrites(), torch.float32)
    for patch in (unpatch_model, patch_model):
        patch(model)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            step(model, x)

"""Models that write in place to what a norm has read: an error that names the write,
and no wrong gradient.
"""

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_rmsnorm import count_launches, patch_model, unpatch_model, use_backend


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = LlamaRMSNorm(64)
        self.linear = nn.Linear(64, 64)


class AddsInPlace(Base):
    def forward(self, x):
        x += self.linear(self.norm(x))
        return x


class SumInPlace(Base):
    """A sum is normalised, and then written to."""

    def forward(self, x):
        h = x + self.linear(x)
        h += self.linear(self.norm(h))
        return h


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


@pytest.mark.parametrize("layer", [AddsInPlace, SumInPlace, ParentWrites])
def test_a_write_behind_a_norm_is_an_error_that_exclude_cures(layer):
    model, x = train(layer(), torch.bfloat16)
    patch_model(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(model, x)
    patch_model(model, exclude="*norm*")
    step(model, x)


def test_float32_fails_as_unpatched():
    model, x = train(AddsInPlace(), torch.float32)
    for patch in (unpatch_model, patch_model):
        patch(model)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            step(model, x)


def test_without_gradients_such_norms_are_fused():
    model = nn.Sequential(AddsInPlace(), AddsInPlace()).bfloat16()
    x = torch.randn(2, 5, 64).bfloat16()
    expected = model(x.clone())
    patch_model(model)
    with torch.no_grad(), use_backend("triton"), count_launches() as launches:
        assert torch.equal(model(x.clone()), expected)
    assert launches["norm_forward"] == 2


def test_what_is_written_to_before_the_norm_reads_it_is_fused_in_training():
    model = nn.Sequential(WritesBefore()).bfloat16()
    patch_model(model)
    with count_launches() as launches, use_backend("triton"):
        model(torch.randn(2, 5, 64).bfloat16()).sum().backward()
    assert launches["norm_backward"] == 1

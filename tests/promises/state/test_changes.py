"""What users change around a patch: forwards, flags, wrappers, names, modes."""

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_rmsnorm import patch_model, unpatch_model, use_backend


def llama_formula(self, h):
    x = h.float()
    return self.weight * (
        x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    ).to(h.dtype)


def make(cls, size=16):
    module = cls(size)
    with torch.no_grad():
        module.weight.copy_(torch.linspace(0.5, 1.5, size))
    return module


X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))


def test_a_forward_replaced_between_two_patches_is_the_one_that_runs():
    class Scaled(LlamaRMSNorm):
        def forward(self, h, scale=None):
            return llama_formula(self, h) * (1.0 if scale is None else 2.0 * scale)

    module = make(Scaled)
    patch_model(module)
    unpatch_model(module)

    def forward(self, h, scale=None):
        return llama_formula(self, h) * (1.0 if scale is None else scale)

    Scaled.forward = forward
    assert patch_model(module).swapped
    assert torch.equal(module(X, scale=3.0), 3.0 * llama_formula(module, X))


class Flagged(LlamaRMSNorm):
    def __init__(self, size):
        super().__init__(size)
        self.plus = False
        self.unused = False

    def forward(self, h):
        y = llama_formula(self, h)
        return y + 1 if self.plus else y


def test_a_flag_that_changes_the_formula_is_watched():
    module = make(Flagged)
    patch_model(module)
    with use_backend("reference"):
        module.unused = True
        assert torch.equal(module(X), llama_formula(module, X))
        module.plus = True
        assert torch.equal(module(X), llama_formula(module, X) + 1)
    (record,) = patch_model(module).skipped
    assert "plus is now True" in record.reason


def test_patching_under_fake_tensors_spoils_nothing():
    class Fresh(LlamaRMSNorm):
        forward = llama_formula

    module = make(Fresh)
    with FakeTensorMode():
        assert patch_model(module).swapped
    unpatch_model(module)
    assert patch_model(module).swapped


def test_a_path_with_glob_characters_names_itself():
    model = nn.ModuleDict({"n[0]": make(LlamaRMSNorm), "n[1]": make(LlamaRMSNorm)})
    report = patch_model(model, include="n[0]")
    assert [record.path for record in report.swapped] == ["n[0]"]


class GatedRMSNorm(LlamaRMSNorm):
    def __init__(self, size):
        super().__init__(size)
        self.gate = nn.Linear(size, size)

    def forward(self, h):
        return super().forward(h) * self.gate(h)


class EncoderStableLayerNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.norm = nn.LayerNorm(size)

    def forward(self, h):
        return self.norm(h)


def test_a_norm_with_children_is_listed_and_a_block_named_after_its_norms_is_not():
    report = patch_model(nn.Sequential(GatedRMSNorm(16), EncoderStableLayerNorm(16)))
    assert [(r.path, r.reason) for r in report.skipped] == [("0", "it has submodules")]
    assert [r.path for r in report.swapped] == ["1.norm"]

"""Norms that are parametrized, compiled or scripted when the patch comes."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_rmsnorm import count_launches, patch_model, unpatch_model, use_backend

# what is asked here is whether dynamo notices the patch, not what a compiler makes of
# it
COMPILER = "eager"


@pytest.fixture(autouse=True)
def fresh_dynamo():
    yield
    torch.compiler.reset()


def counted(function, *args):
    """(the output, how often the forward kernel ran)."""
    with count_launches() as launches, use_backend("triton"):
        return function(*args), launches["norm_forward"]


def assert_near(a, b):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


class Halved(nn.Module):
    def forward(self, weight):
        return weight / 2


def test_a_norm_parametrized_before_the_patch_is_left_alone_until_it_is_not(
    fused_calls,
):
    norm = LlamaRMSNorm(16)
    x = torch.randn(3, 16)
    parametrize.register_parametrization(norm, "weight", Halved())
    (record,) = patch_model(nn.Sequential(norm, nn.LayerNorm(16))).skipped
    assert record.path == "0"
    assert "parametrized" in record.reason
    parametrize.remove_parametrizations(norm, "weight")
    assert not patch_model(norm, strict=True).skipped
    with use_backend("reference"):
        assert torch.equal(norm(x), LlamaRMSNorm.forward(norm, x))
    assert len(fused_calls) == 1


def test_patching_and_unpatching_do_not_use_up_dynamos_recompilations():
    norm = LlamaRMSNorm(16)
    compiled = torch.compile(norm, backend=COMPILER, fullgraph=True)
    x = torch.randn(3, 16)
    expected = compiled(x)
    for _ in range(12):  # above torch._dynamo.config.recompile_limit
        patch_model(norm)
        y, launches = counted(compiled, x)
        assert launches == 1
        assert_near(y, expected)
        unpatch_model(norm)
        assert torch.equal(compiled(x), expected)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return self.linear(self.norm(x))


def trace(module):
    return torch.jit.trace(module, torch.randn(2, 16))


@pytest.mark.parametrize("make", [torch.jit.script, trace])
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_scripted_and_traced_modules_are_named_and_left_alone(make, fused_calls):
    model = nn.Sequential(make(nn.LayerNorm(16)), make(Block()), nn.LayerNorm(16))
    x = torch.randn(2, 16)
    expected = model(x)
    report = patch_model(model)
    assert [record.path for record in report.swapped] == ["2"]
    assert [record.path for record in report.skipped] == ["0", "1.norm"]
    for record in report.skipped:
        assert record.class_name == "LayerNorm"
        assert "scripted or traced" in record.reason
        assert "before torch.jit" in record.cure
    with use_backend("reference"):
        assert torch.equal(model(x), expected)
    assert len(fused_calls) == 1
    assert unpatch_model(model) == 1

"""A norm of its own for each head, as in StableLM 2: all heads in one launch, the same numbers."""

import copy

import pytest
import tiny_models
import torch
from torch import nn
from transformers.models.stablelm.modeling_stablelm import StableLmLayerNormPerHead

from hf_rmsnorm import count_launches, patch_model, unpatch_model, use_backend, verify_equivalence


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = tiny_models.build("stablelm", qk_layernorm=True).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "layernorm.norms" in name:
            parameter.data.copy_(1 + 0.3 * torch.randn(parameter.shape))
    return model


def test_the_heads_of_a_model_are_one_launch(model):
    ids = tiny_models.token_ids(2, 9)
    with torch.no_grad():
        own = model(ids).logits
        patch_model(model, strict=True, fuse_residual=False)
        with use_backend("triton"):
            one_by_one = model(ids).logits
        report = patch_model(model, strict=True, fuse_residual=True)
        with use_backend("triton"), count_launches() as launches:
            assert torch.equal(model(ids).logits, one_by_one)
    layers = model.config.num_hidden_layers
    assert dict(launches) == {"norm_forward": 4 * layers + 1}, "two norms, q and k of each layer, and the last norm"
    assert sum(layer.fused == "all norms in one launch" for layer in report.layers) == 2 * layers
    unpatch_model(model)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, own)


@pytest.mark.full
def test_verification_judges_all_heads_together(model):
    ids = tiny_models.token_ids(2, 9)
    report = verify_equivalence(model, inputs={"input_ids": ids}, max_new_tokens=0, backend="triton", backward=True)
    assert report.passed, report
    found = [check.path for check in report.fused if check.path.endswith("layernorm: all norms")]
    assert len(found) == 2 * model.config.num_hidden_layers


def test_verification_of_plain_torch_runs_the_norms_one_by_one(model):
    inputs = {"input_ids": tiny_models.token_ids(2, 9)}
    assert verify_equivalence(model, inputs=inputs, max_new_tokens=0, backend="reference").passed


def heads(dtype, bias=False):
    torch.manual_seed(0)
    module = StableLmLayerNormPerHead(32, 4, bias=bias).to(dtype)
    for parameter in module.parameters():
        parameter.data.copy_(1 + 0.3 * torch.randn(parameter.shape))
    return module, torch.randn(2, 7, 4, 32).to(dtype).transpose(1, 2)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_module(dtype, bias):
    module, x = heads(dtype, bias)
    dy = torch.randn(x.shape).to(dtype)

    def step(module):
        given = x.clone(memory_format=torch.preserve_format).requires_grad_()
        y = module(given)
        return [y.detach(), *torch.autograd.grad(y, [given, *module.parameters()], dy)]

    expected, exact = step(module), copy.deepcopy(module).double()
    patch_model(nn.ModuleList([module]), strict=True)
    with use_backend("triton"), count_launches() as launches:
        got = step(module)
    assert launches["norm_forward"] == launches["norm_backward"] == 1
    assert got[0].stride() == expected[0].stride()
    right = exact(x.double())
    ulp = torch.finfo(dtype).eps * right.abs().max()
    assert (got[0] - right).abs().max() <= 1.5 * (expected[0] - right).abs().max() + ulp
    for a, b in zip(got, expected, strict=True):
        assert (a.double() - b.double()).abs().max() <= 8 * torch.finfo(dtype).eps * b.double().abs().max()


@pytest.mark.parametrize("what", ["a hook", "another eps", "float64", "three dimensions", "fewer heads"])
def test_what_is_left_to_the_norms_one_by_one(what):
    module, x = heads(torch.float32)
    patch_model(nn.ModuleList([module]), strict=True)
    if what == "a hook":
        module.norms[1].register_forward_hook(lambda module, args, y: 2 * y)
    if what == "another eps":
        module.norms[1].eps = 1.0
    if what == "float64":
        module, x = module.double(), x.double()
    x = {"three dimensions": x[0], "fewer heads": x[:, :3]}.get(what, x)
    with torch.no_grad():
        expected = torch.cat([norm(part) for norm, part in zip(module.norms, x.split(1, dim=1), strict=False)], dim=1)
        with use_backend("triton") if what != "float64" else use_backend("reference"), count_launches() as launches:
            got = module(x)
    assert launches["norm_forward"] != 1
    torch.testing.assert_close(got, expected)


class Reversed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(32) for _ in range(4)])

    def forward(self, x):
        heads = torch.split(x, 1, dim=1)
        return torch.cat([norm(head) for norm, head in zip(self.norms, heads[::-1], strict=True)], dim=1)


def test_another_order_is_not_taken_for_it():
    model = Reversed()
    assert "in one launch" not in str(patch_model(nn.ModuleList([model])))

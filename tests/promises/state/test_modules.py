"""Norms that are shared, hooked, wrapped, compiled or scripted when the patch comes, or
afterwards.
"""

import pytest
import tiny_models
import torch
from torch import nn
from torch.nn.utils import parametrize, prune
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_rmsnorm import count_launches, patch_model, unpatch_model, use_backend

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ids = tiny_models.token_ids().to(DEVICE)
# what is asked here is whether dynamo notices the patch, not what a compiler makes of
# it
COMPILER = "eager"


@pytest.fixture(autouse=True)
def fresh_dynamo():
    yield
    torch.compiler.reset()


def build(family="qwen3"):
    return tiny_models.build(family).to(DEVICE)


def counted(function, *args, backend="triton"):
    """(the output, how often the forward kernel ran)."""
    with count_launches() as launches, use_backend(backend):
        return function(*args), launches["norm_forward"]


def near(a, b):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    return True


# Sharing


def test_one_norm_at_several_paths_of_a_model(fused_calls):
    """As a model that ties its blocks: one module for all layers, called at each of
    them.
    """
    plain, model = build(), build()
    for m in (plain, model):
        for layer in m.model.layers:
            layer.post_attention_layernorm = layer.input_layernorm
        m.model.layers[1].input_layernorm = m.model.layers[0].input_layernorm
        m.model.layers[1].self_attn = m.model.layers[0].self_attn
    expected = plain(ids).logits
    report = patch_model(model, strict=True)
    shared = [
        f"model.layers.{i}.{name}"
        for i, name in ((0, "input"), (0, "post_attention"), (1, "input"))
    ]
    assert {f"{path}_layernorm" for path in shared} <= {r.path for r in report.swapped}
    assert (
        len(report.swapped) == 9
        and len({id(model.get_submodule(r.path)) for r in report.swapped}) == 5
    )
    for name in ("input_layernorm", "self_attn"):
        assert getattr(model.model.layers[0], name) is getattr(
            model.model.layers[1], name
        )
    with use_backend("reference"):
        assert torch.equal(model(ids).logits, expected)
    assert len(fused_calls) == 9
    assert list(model.state_dict()) == list(plain.state_dict())
    assert unpatch_model(model) == 5 and torch.equal(model(ids).logits, expected)


# Hooks and parametrizations


@pytest.mark.parametrize("when", ["before", "after"])
def test_every_kind_of_hook_fires_as_often_and_sees_the_same(when, fused_calls):
    norm = LlamaRMSNorm(16)
    x, seen = torch.randn(3, 16, generator=torch.Generator().manual_seed(0)), []

    def hang():
        norm.register_forward_pre_hook(
            lambda m, args: (seen.append("pre"), (args[0] * 2,))[1]
        )
        norm.register_forward_pre_hook(
            lambda m, args, kwargs: seen.append(("kwargs", *kwargs)), with_kwargs=True
        )
        norm.register_forward_hook(
            lambda m, args, y: seen.append(("post", m is norm)) or y + 1
        )
        norm.register_forward_hook(
            lambda m, args, kwargs, y: seen.append("late"),
            with_kwargs=True,
            always_call=True,
        )
        norm.register_full_backward_pre_hook(lambda m, dy: seen.append("backward pre"))
        norm.register_full_backward_hook(
            lambda m, dx, dy: seen.append(("backward", len(dx)))
        )
        norm.register_state_dict_pre_hook(lambda m, prefix, keep: seen.append("state"))

    def outcome():
        seen.clear()
        leaf = x.clone().requires_grad_()
        with use_backend("reference"):
            y = norm(leaf)
        y.sum().backward()
        norm.state_dict()
        return y, leaf.grad, list(seen)

    if when == "before":
        hang()
        expected = outcome()
        patch_model(norm)
    else:
        patch_model(norm)
        hang()
        unpatch_model(norm)
        expected = outcome()
        patch_model(norm)
    y, dx, now = outcome()
    assert len(fused_calls) == 1 and now == expected[2] and len(now) == 7
    assert torch.equal(y, expected[0])
    torch.testing.assert_close(dx, expected[1], rtol=1e-5, atol=1e-6)


class Halved(nn.Module):
    def forward(self, weight):
        return weight / 2


def test_a_model_with_one_norm_parametrized_before_the_patch(fused_calls):
    plain, model = build(), build()
    for m in (plain, model):
        parametrize.register_parametrization(m.model.norm, "weight", Halved())
    report = patch_model(model)
    (record,) = report.skipped
    assert (
        record.path == "model.norm"
        and "parametrized" in record.reason
        and len(report.swapped) == 8
    )
    with use_backend("reference"):
        assert torch.equal(model(ids).logits, plain(ids).logits)
    assert len(fused_calls) == 8
    parametrize.remove_parametrizations(model.model.norm, "weight")
    parametrize.remove_parametrizations(plain.model.norm, "weight")
    assert not patch_model(model, strict=True).skipped
    with use_backend("reference"):
        assert torch.equal(model(ids).logits, plain(ids).logits)
    assert len(fused_calls) == 8 + 9


@pytest.mark.parametrize("order", ["pruned first", "patch first"])
def test_a_pruned_norm(order, fused_calls):
    """Its weight is a plain attribute that a hook writes before each forward."""
    norm, x = LlamaRMSNorm(16), torch.randn(3, 16)
    if order == "patch first":
        patch_model(norm)
    prune.l1_unstructured(norm, "weight", amount=4)
    assert len(patch_model(norm, strict=True).swapped) == 1
    with use_backend("reference"):
        y = norm(x)
    assert len(fused_calls) == 1 and (y == 0).sum() == 3 * 4
    assert torch.equal(y, LlamaRMSNorm.forward(norm, x))


# torch.compile


@pytest.mark.full
@pytest.mark.parametrize("how", ["model.compile()", "torch.compile(model)"])
@pytest.mark.parametrize("order", ["patch first", "compiled first"])
def test_a_compiled_model(how, order):
    model = build()
    expected = model(ids).logits

    def compile():
        if how == "model.compile()":
            model.compile(backend=COMPILER, fullgraph=True)
            return model
        return torch.compile(model, backend=COMPILER, fullgraph=True)

    if order == "patch first":
        patch_model(model, strict=True)
        called = compile()
    else:
        called = compile()
        assert torch.equal(called(ids).logits, expected)
        # through the wrapper, where there is one
        report = patch_model(called, strict=True)
        assert len(report.swapped) == 9
    output, launches = counted(called, ids)
    assert launches == 9 and near(output.logits, expected)
    assert torch.equal(counted(called, ids, backend="reference")[0].logits, expected)
    assert unpatch_model(called) == 9
    output, launches = counted(called, ids)
    assert launches == 0 and torch.equal(output.logits, expected)


def test_patching_and_unpatching_do_not_use_up_dynamos_recompilations():
    norm = LlamaRMSNorm(16).to(DEVICE)
    compiled = torch.compile(norm, backend=COMPILER, fullgraph=True)
    x = torch.randn(3, 16, device=DEVICE)
    expected = compiled(x)
    for _ in range(12):  # above torch._dynamo.config.recompile_limit
        patch_model(norm)
        y, launches = counted(compiled, x)
        assert launches == 1 and near(y, expected)
        unpatch_model(norm)
        assert torch.equal(compiled(x), expected)


# torch.jit, torch.fx


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return self.linear(self.norm(x))


@pytest.mark.parametrize(
    "make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.randn(2, 16))]
)
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_scripted_and_traced_modules_are_named_and_left_alone(make, fused_calls):
    model = nn.ModuleDict(
        {
            "norm": make(nn.LayerNorm(16)),
            "block": make(Block()),
            "free": nn.LayerNorm(16),
        }
    )
    x = torch.randn(2, 16)
    expected = [module(x) for module in model.values()]
    types = [type(module) for module in model.modules()]
    report = patch_model(model)
    assert [r.path for r in report.swapped] == ["free"]
    assert [(r.path, r.class_name) for r in report.skipped] == [
        ("norm", "LayerNorm"),
        ("block.norm", "LayerNorm"),
    ]
    assert all(
        "scripted or traced" in r.reason and "before torch.jit" in r.cure
        for r in report.skipped
    )
    with pytest.raises(
        ValueError, match="2 of the norms cannot be swapped.*'norm'.*scripted"
    ):
        patch_model(model, strict=True)
    with use_backend("reference"):
        assert all(
            torch.equal(m(x), y) for m, y in zip(model.values(), expected, strict=True)
        )
    assert len(fused_calls) == 1
    assert (
        unpatch_model(model) == 1
        and [type(module) for module in model.modules()] == types
    )

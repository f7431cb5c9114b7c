"""Sums whose norm is further in, in another module, behind a view, or made by a function beside the forward."""

import functools
import sys

import pytest
import torch
import torch.nn.functional as F
from fusion_models import Block, fused, row
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from benchmarks.counting import Operators
from hf_rmsnorm import patch_model, use_backend
from hf_rmsnorm.fused.source import forward_source, sums


def dropout_add(x, residual, training: bool = False):
    out = F.dropout(x, p=0.1, training=training)
    out = residual + out
    return out


def add_if(x, residual=None):
    if residual is not None:
        x = residual + x
    return x


class AddsAndNormalises(nn.Module):
    """As `BertSelfOutput`."""

    def __init__(self):
        super().__init__()
        self.dense, self.norm = nn.Linear(32, 32), nn.RMSNorm(32)

    def forward(self, x, residual):
        return self.norm(self.dense(x) + residual)


class FurtherIn(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = AddsAndNormalises(), AddsAndNormalises()

    def forward(self, x):
        return self.second(self.first(x, x), x)


class Adds(nn.Module):
    """As `MegatronBertSelfOutput`."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(32, 32)

    def forward(self, x, residual):
        return residual + self.dense(x)


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.output = nn.RMSNorm(32), Adds()

    def forward(self, x):
        return self.output(self.norm(x), x), None


class Elsewhere(nn.Module):
    """The sum is two modules further in than the norm that reads it, as in `MegatronBertLayer`."""

    gradient_checkpointing = False

    def __init__(self):
        super().__init__()
        self.attention, self.norm, self.output = Around(), nn.RMSNorm(32), Adds()

    def forward(self, x):
        y = self.attention(x)[0]
        return self.output(self.norm(y), y)


class ByAFunction(Block):
    def forward(self, x):
        h = dropout_add(self.a(self.n1(x)), x, training=self.training)
        return add_if(self.b(self.n2(h)), residual=h)


class ThroughAView(Block):
    """As `OPTDecoderLayer`."""

    def forward(self, x):
        h = x + self.a(self.n1(x))
        shape = h.shape
        h = h.reshape(-1, h.size(-1))
        return (h + self.b(self.n2(h))).view(shape)


class ReturnsAList(Block):
    """As GPT's `Block`."""

    def forward(self, x):
        return ([x + self.b(self.n2(x + self.a(self.n1(x))))] + [None][1:])[0]


BEHIND = "+ the norm behind it"
INSIDE = [f"+ n2, {BEHIND}", "+ n2"]  # the norm behind the last layer is no child of what calls it
MODELS = {  # (model, what is fused, sums of a forward)
    "further in": (lambda: row(FurtherIn(), FurtherIn()), ["+ norm"] * 4, 4),
    "elsewhere": (lambda: row(Elsewhere(), Elsewhere()), [BEHIND] * 3, 3),
    "by a function": (lambda: row(ByAFunction(), ByAFunction()), INSIDE, 3),
    "through a view": (lambda: row(ThroughAView(), ThroughAView()), INSIDE, 3),
    "in a list": (lambda: row(ReturnsAList(), ReturnsAList()), INSIDE, 3),
}


def outcome(model, x, count: bool = False):
    """The output and gradients of a model, or how often its forward adds by itself."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    if count:
        with torch.no_grad(), use_backend("triton"), Operators() as operators:
            model(x)
        return operators.counts.get("add", 0)
    with use_backend("reference"):
        y = model(x)
        y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("name", MODELS)
def test_the_sum_is_computed_with_its_norm_wherever_that_is(name):
    make, expected, sums = MODELS[name]
    model, x = make(), torch.randn(2, 5, 32)
    patch_model(model, fuse_residual=False)
    apart, added = outcome(model, x), outcome(model, x, count=True)
    assert fused(patch_model(model, fuse_residual=True)) == expected
    assert outcome(model, x, count=True) == added - sums
    for a, b in zip(outcome(model, x), apart, strict=True):
        assert torch.equal(a, b)
    with use_backend("triton"):
        y = model(x)
        y.square().sum().backward()
    patch_model(model, fuse_residual=False)
    with use_backend("triton"):
        assert torch.equal(model(x), y)


@pytest.mark.parametrize("place", ["0.attention", "0.attention.output", "0"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda m: m.__name__)
def test_a_hook_between_the_sum_and_its_norm_may_write(place, mode):
    """Past the sum's version, which would not tell."""
    model, x = row(Elsewhere(), Elsewhere()), torch.randn(2, 5, 32)
    patch_model(model)
    hook = model.get_submodule(place).register_forward_hook(lambda module, args, y: _double(y))
    outputs = []
    for fuse_residual in (True, False):
        patch_model(model, fuse_residual=fuse_residual)
        with mode(), use_backend("triton"):
            outputs.append(model(x))
    hook.remove()
    assert torch.equal(*outputs)


class WritesToTheNorm(Block):
    def forward(self, x):
        h = (x + self.a(self.n1(x))).reshape(-1, 32)
        y = self.n2(h)
        y += 1
        return (h + self.b(y)).view(x.shape)


def test_what_a_norm_behind_a_view_returns_may_be_written_to():
    model, x = row(WritesToTheNorm(), WritesToTheNorm()), torch.randn(2, 5, 32)
    patch_model(model, fuse_residual=False)
    apart = outcome(model, x)
    assert fused(patch_model(model, fuse_residual=True)) == INSIDE
    assert all(map(torch.equal, outcome(model, x), apart))
    with use_backend("triton"):
        model(x).sum().backward()


def _double(y) -> None:
    (y[0] if isinstance(y, tuple) else y).data.mul_(2)


def test_a_function_that_is_exchanged_after_the_patch_is_the_one_that_runs(monkeypatch):
    model, x = row(ByAFunction(), ByAFunction()), torch.randn(2, 5, 32)
    patch_model(model)
    monkeypatch.setattr(sys.modules[__name__], "dropout_add", lambda x, residual, training: residual - x)
    with use_backend("triton"):
        found = model(x)
        patch_model(model, fuse_residual=False)
        assert torch.equal(model(x), found)


def test_defaults_that_are_exchanged_after_the_patch_count(monkeypatch):
    model, x = row(ByAFunction(), ByAFunction()).train(), torch.randn(2, 5, 32)
    patch_model(model)
    for defaults in ((None,), (torch.ones(2, 5, 32),)):
        monkeypatch.setattr(add_if, "__defaults__", defaults)
        found = []
        for fuse_residual in (True, False):
            patch_model(model, fuse_residual=fuse_residual)
            torch.manual_seed(0)
            with use_backend("triton"):
                found.append(model(x))
        assert torch.equal(*found)


LAST = None


def add(x, residual):
    return residual + x


def add_and_note(x, residual):
    global LAST
    LAST = residual + x
    return LAST


def add_and_close_over(x, residual):
    out = residual + x
    add_and_close_over.sum = lambda: out
    out = residual + x
    return out


@functools.wraps(add)
def wraps(x, residual):
    return add(2 * x, residual)


class ByAPlainFunction(Block):
    def forward(self, x):
        return add(self.a(self.n1(x)), x) + self.b(self.n2(x))


class ByANote(Block):
    def forward(self, x):
        return add_and_note(self.a(self.n1(x)), x)


class ByAClosure(Block):
    def forward(self, x):
        return add_and_close_over(self.a(self.n1(x)), x)


class ByAWrapper(Block):
    def forward(self, x):
        return wraps(self.a(self.n1(x)), x)


@pytest.mark.parametrize("cls, taken", [(ByAPlainFunction, 2), (ByANote, 0), (ByAClosure, 0), (ByAWrapper, 0)])
def test_which_functions_add(cls, taken):
    function, definition = forward_source(cls)
    assert len(sums(definition, function)) == taken


class LooksAway(Block):
    """A view that is cut off from the graph, as a router's that takes no gradient."""

    def forward(self, x):
        h = x + self.a(self.n1(x))
        with torch.no_grad():
            v = h.view(-1, 32)
        return h + self.b(self.n2(v)).view(x.shape)


def test_a_view_without_gradients_has_none():
    model, x = row(LooksAway(), LooksAway()), torch.randn(2, 5, 32)
    expected = outcome(model, x)
    patch_model(model)
    for a, b in zip(outcome(model, x), expected, strict=True):
        assert torch.equal(a, b)
    with use_backend("triton"):
        y = model(x.requires_grad_())
        (dx,) = torch.autograd.grad(y.square().sum(), x)
    torch.testing.assert_close(dx, expected[1], rtol=1e-4, atol=1e-4)


def test_errors_name_the_line_of_the_forward():
    model = row(ByAFunction(), ByAFunction())
    model[0].a.register_forward_hook(lambda *_: 1 / 0)
    lines = []
    for patch in (False, True):
        patch_model(model, fuse_residual=patch)
        with pytest.raises(ZeroDivisionError) as error:
            model(torch.randn(2, 5, 32))
        lines.append([(f.name, f.lineno) for f in error.traceback if f.path.name == "test_passes.py"])
    assert [line for line in lines[0] if line[0] == "forward"] == [line for line in lines[1] if line[0] == "forward"]


class TakesAnotherByThatName(Block):
    def forward(self, x):
        dropout_add = self.subtract
        h = dropout_add(self.a(self.n1(x)), x)
        return h + self.b(self.n2(h))

    @staticmethod
    def subtract(x, residual):
        return residual - x


def test_a_name_of_the_forwards_own_is_no_function_beside_it():
    report = patch_model(row(TakesAnotherByThatName(), TakesAnotherByThatName()))
    assert fused(report)[0] == BEHIND


SMALL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48, "vocab_size": 64,
    "pad_token_id": 0,
}  # fmt: skip
EACH = "q_norm with apply_rotary_pos_emb, k_norm with apply_rotary_pos_emb, each in one launch"
TYPES = {  # what the first layer's sums are computed with
    "bert": ["encoder.layer.0.attention.output + LayerNorm", "encoder.layer.0.output + LayerNorm"],
    "roberta-prelayernorm": [f"encoder.layer.0.attention.output {BEHIND}", f"encoder.layer.0.output {BEHIND}"],
    "bloom": [f"h.0.mlp {BEHIND}"],
    "falcon": [f"h.0 {BEHIND}"],
    "opt": [f"decoder.layers.0 + final_layer_norm, {BEHIND}"],
    "gemma4_text": ["layers.0 + pre_feedforward_layernorm", f"layers.0.self_attn {EACH}"],
}
EXTRA = {
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 48},
    "bloom": {"n_head": 2, "n_layer": 2},
    "gemma4_text": {"head_dim": 16, "num_key_value_heads": 1, "vocab_size_per_layer_input": 64,
                    "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0},
}  # fmt: skip


@pytest.mark.parametrize("model_type", TYPES)
def test_the_sums_of_models_that_add_elsewhere(model_type):
    config = AutoConfig.for_model(model_type, **SMALL, **EXTRA.get(model_type, {}))
    causal = model_type in ("bloom", "falcon", "opt", "gemma4_text")
    model = (AutoModelForCausalLM if causal else AutoModel).from_config(config).eval()
    ids = torch.arange(3, 19)[None]
    with torch.no_grad(), use_backend("reference"):
        expected = model(ids)[0]
        report = patch_model(model)
        assert torch.equal(model(ids)[0], expected)
    found = [f"{layer.path} {layer.fused}" for layer in report.layers if layer.fused and ".0" in layer.path]
    assert [words[words.find(TYPES[model_type][0][:4]) :] for words in found] == TYPES[model_type]

"""Which layers are listed, with what is fused in them or why nothing is."""

import pytest
import torch
from fusion_models import INSIDE, build, fused
from torch import nn
from torch.nn.utils.parametrize import (
    register_parametrization,
    remove_parametrizations,
)
from transformers import AutoConfig, AutoModel

from hf_rmsnorm import patch_model, patched, unpatch_model, use_backend

SIZES = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 32, "vocab_size": 64,
}  # fmt: skip
TYPES = {
    "opt": {"word_embed_proj_dim": 16, "ffn_dim": 32},
    "bert": {},
    "deberta-v2": {},
    "gpt_neox": {},
    "phi3": {"num_key_value_heads": 2, "pad_token_id": 0},
    "t5": {
        "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2,
        "vocab_size": 64,
    },
    "bart": {
        "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32,
    },
    "vit": {"image_size": 8, "patch_size": 4},
    "mamba2": {"num_heads": 4, "head_dim": 8, "n_groups": 1, "state_size": 8},
    "swin": {
        "image_size": 16,
        "patch_size": 2,
        "embed_dim": 8,
        "depths": [1, 1],
        "num_heads": [1, 2],
    },
}  # fmt: skip


def repeated(model):
    """The paths of the modules in lists."""
    paths = []
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            paths += [f"{path}.{i}." for i in range(len(module))]
    return paths


@pytest.mark.parametrize("model_type", TYPES)
def test_every_layer_that_holds_a_patched_norm_is_listed(model_type):
    sizes = SIZES
    if model_type == "swin":
        sizes = {"hidden_size": 16}
    config = AutoConfig.for_model(model_type, **{**sizes, **TYPES[model_type]})
    model = AutoModel.from_config(config)
    report = patch_model(model)
    norms = " ".join(record.path for record in report.swapped)
    listed = [f"{layer.path}." for layer in report.layers]
    held = [path for path in repeated(model) if path in norms]
    assert held
    for path in held:
        assert any(layer.startswith(path) for layer in listed), path
    for layer in report.layers:
        assert bool(layer.fused) != bool(layer.reason)
    order = [f"{path}." for path, _ in model.named_modules()]
    assert listed == sorted(listed, key=order.index)


REASON = "no sum in its forward is followed directly by a patched norm of its own"
ROTARY = "apply_rotary_pos_emb in one launch"


def test_why_nothing_is_fused():
    model = AutoModel.from_config(AutoConfig.for_model("olmo", **SIZES))
    report = patch_model(model)
    assert fused(report) == [REASON, ROTARY] * 2
    assert f"not fused 2 x OlmoDecoderLayer: {REASON}" in " ".join(str(report).split())


class ReturnsASum(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm
        self.mix = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.mix(self.norm(x))


class Alone(nn.Module):
    """A module whose one child is none, as Informer's and others' optional parts are."""

    def __init__(self):
        super().__init__()
        self.register_module("_part", None)

    def forward(self, x):
        return x


def test_rows_with_places_that_hold_nothing():
    layers = [ReturnsASum(nn.RMSNorm(8)), None, Alone(), nn.RMSNorm(8)]
    report = patch_model(nn.Sequential(nn.ModuleList(layers), Alone()))
    assert len(report.swapped) == 2
    assert [layer.path for layer in report.layers] == ["0.0"]


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


class Scaled(ReturnsASum):
    """A layer with a parameter of its own."""

    def __init__(self):
        super().__init__(nn.RMSNorm(8))
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return self.norm(x + self.weight * self.mix(x))


@pytest.mark.parametrize("first", ["patch", "parametrize"])
@pytest.mark.parametrize("undone_first", ["patch", "parametrize"])
def test_a_parametrized_layer_and_a_patch_in_any_order(first, undone_first):
    model = nn.Sequential(Scaled(), Scaled())
    layer = model[0]
    if first == "parametrize":
        register_parametrization(layer, "weight", Doubled())
    of_layer, of_other = patch_model(model).layers
    if first == "patch":
        register_parametrization(layer, "weight", Doubled())
    assert of_other.fused
    assert bool(of_layer.fused) == (first == "patch")
    assert ("parametrized" in of_layer.reason) == (first == "parametrize")
    if undone_first == "patch":
        unpatch_model(model)
    remove_parametrizations(layer, "weight", leave_parametrized=False)
    unpatch_model(model)
    assert type(layer) is Scaled
    assert torch.equal(layer.weight, torch.ones(8))


def shared_heads(model):
    for layer in model.model.layers:
        layer.self_attn.k_norm = layer.self_attn.q_norm


def shared_in_a_layer(model):
    for layer in model.model.layers:
        layer.input_layernorm = layer.post_attention_layernorm


QK = "q_norm, k_norm, apply_rotary_pos_emb in one launch"
ONE_OF_LAYER = "input_layernorm and post_attention_layernorm are one module"


@pytest.mark.parametrize(
    "share, words",
    [
        (shared_heads, [INSIDE, ROTARY] * 3),
        (shared_in_a_layer, [ONE_OF_LAYER, QK] * 3),
    ],
)
def test_a_norm_in_several_places_is_launched_apart(share, words):
    model = build("qwen3")
    share(model)
    ids = torch.arange(3, 19)[None]
    with torch.no_grad(), use_backend("reference"):
        expected = model(ids).logits
        report = patch_model(model)
        assert torch.equal(model(ids).logits, expected)
    assert fused(report) == words
    assert str(report).count("one module at 2 paths") >= 1


def test_a_second_patch_sees_the_norms_swapped_since_and_undoes_no_more():
    model = build("llama")
    report = patch_model(model, exclude="*post_attention*")
    assert fused(report) == [REASON, ROTARY] * 3
    with patched(model) as report:
        assert fused(report) == [INSIDE, ROTARY] * 3
    model.model.layers[1].forward = lambda *args, **kwargs: None
    report = patch_model(model)
    assert fused(report)[:2] == [INSIDE, ROTARY]
    assert "replaced on the instance" in fused(report)[2]

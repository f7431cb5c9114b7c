"""Which layers are listed, with what is fused in them or why nothing is."""

import pytest
from torch import nn
from transformers import AutoConfig, AutoModel
from transformers.models.convnext.modeling_convnext import ConvNextLayerNorm

from hf_rmsnorm import patch_model

SIZES = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 64,
}  # fmt: skip
TYPES = {
    "opt": {"word_embed_proj_dim": 16, "ffn_dim": 32},
    "bert": {},
    "deberta-v2": {},
    "gpt_neox": {},
    "phi3": {"num_key_value_heads": 2, "pad_token_id": 0},
    "t5": {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 64},
    "bart": {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32},
    "vit": {"image_size": 8, "patch_size": 4},
    "mamba2": {"num_heads": 4, "head_dim": 8, "n_groups": 1, "state_size": 8},
    "swin": {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2]},
}


@pytest.mark.parametrize("model_type", TYPES)
def test_every_layer_that_holds_a_patched_norm_is_listed(model_type):
    sizes = {"hidden_size": 16} if model_type == "swin" else SIZES
    model = AutoModel.from_config(AutoConfig.for_model(model_type, **{**sizes, **TYPES[model_type]}))
    report = patch_model(model)
    listed = [layer.path + "." for layer in report.layers]
    rows = [path for path, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    held = {f"{path}.{i}." for path in rows for i in range(len(model.get_submodule(path)))}
    held = {layer for layer in held if any(record.path.startswith(layer) for record in report.swapped)}
    assert held and not [layer for layer in held if not any(path.startswith(layer) for path in listed)]
    assert all(bool(layer.fused) != bool(layer.reason) for layer in report.layers)
    assert listed == sorted(listed, key=[f"{path}." for path, _ in model.named_modules()].index)


@pytest.mark.parametrize(
    ("model_type", "class_name", "reason"),
    [
        ("olmo", "OlmoDecoderLayer", "no launch serves a sum with norms like its own, as their formula or notes say"),
        ("xmod", "XmodLayer", "its norms are in attention.output, output: sums are fused where a layer itself calls"),
    ],
)
def test_why_nothing_is_fused(model_type, class_name, reason):
    model = AutoModel.from_config(AutoConfig.for_model(model_type, **SIZES, **TYPES.get(model_type, {})))
    report = patch_model(model)
    assert [layer.class_name for layer in report.layers] == [class_name] * 2
    assert all(layer.reason.startswith(reason) for layer in report.layers)
    assert f"layers 2 x {class_name}: not fused: {reason}" in " ".join(str(report).split())


class ReturnsASum(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm, self.mix = norm, nn.Linear(8, 8)

    def forward(self, x):
        return x + self.mix(self.norm(x))


def test_a_sum_that_no_norm_is_behind():
    first, last = patch_model(nn.Sequential(ReturnsASum(nn.RMSNorm(8)), ReturnsASum(nn.RMSNorm(8)))).layers
    assert first.fused == "+ the norm behind it"
    assert last.reason == "no patched norm is known to read the sum that it returns"


def test_norms_that_no_sum_is_computed_with():
    (layer,) = patch_model(nn.Sequential(ReturnsASum(ConvNextLayerNorm(8, data_format="channels_first")))).layers
    assert layer.reason == "no launch serves a sum with norms like its own, as their formula or notes say"


def test_a_norm_by_itself_is_no_layer():
    assert patch_model(nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8))).layers == ()


class Alone(nn.Module):
    """A module whose one child is none, as Informer's and others' optional parts are."""

    def __init__(self):
        super().__init__()
        self.register_module("_part", None)

    def forward(self, x):
        return x


def test_rows_with_places_that_hold_nothing():
    rows = {"layers": nn.ModuleList([ReturnsASum(nn.RMSNorm(8)), None, Alone(), ReturnsASum(nn.RMSNorm(8))]),
            "parts": nn.ModuleList([None]), "chain": nn.Sequential(nn.RMSNorm(8), Alone())}  # fmt: skip
    report = patch_model(nn.ModuleDict(rows))
    assert len(report.swapped) == 3 and {layer.path for layer in report.layers} == {"layers.0", "layers.3"}


class Called(nn.Module):
    """Its own forward calls a list that holds nothing in a place."""

    def __init__(self):
        super().__init__()
        self.norm, self.convolutions = nn.RMSNorm(8), nn.ModuleList([nn.Linear(8, 8), None])

    def forward(self, x):
        return self.convolutions[0](self.norm(x)) if self.convolutions[1] is None else x


def test_a_called_list_with_places_that_hold_nothing():
    assert len(patch_model(Called()).swapped) == 1


def test_an_empty_list_of_layers_is_no_row():
    """As ConvNext's first stage has, which does not downsample."""
    model = nn.ModuleDict({"stages": nn.ModuleList(), "layers": nn.ModuleList([ReturnsASum(nn.RMSNorm(8))])})
    assert len(patch_model(model).layers) == 1

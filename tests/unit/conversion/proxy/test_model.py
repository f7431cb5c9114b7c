"""Proxy models: of which size, class and inputs they are made."""

import pytest
import torch
from conversion_models import config_of
from transformers import PersimmonConfig, SwinConfig, ViTModel, VitsConfig

from hf_rmsnorm.conversion.errors import ConversionRefused
from hf_rmsnorm.conversion.proxy import model as proxy_module
from hf_rmsnorm.conversion.proxy.discover import discover
from hf_rmsnorm.conversion.proxy.model import make_proxy

TEXT = {"num_hidden_layers": 2, "vocab_size": 96, "max_position_embeddings": 32}


def test_a_norm_over_two_channels_is_not_taken_while_there_is_another_one(monkeypatch):
    """There it is nearly a sign: no gradients to find anything by, and roundings that
    grow from layer to layer.
    """
    monkeypatch.setattr(proxy_module, "SMALL", 0)
    # heads of two channels would fit, those of four do not
    monkeypatch.setattr(proxy_module, "MIDDLE", 15_000)
    more = {
        "hidden_size": 256,
        "num_attention_heads": 4,
        "intermediate_size": 512,
        "qk_layernorm": True,
    }
    proxy = make_proxy(PersimmonConfig(**TEXT, **more))
    assert proxy.config.hidden_size == 4 * proxy_module.LEAST_ROW
    plan = discover(proxy)
    assert len(plan.norms) == 9
    for norm in plan.norms:
        assert norm.becomes_rms


def test_a_model_that_runs_for_minutes_is_given_up(monkeypatch):
    """VITS' weights say how long it speaks; random ones say minutes."""
    monkeypatch.setattr(proxy_module, "MOST_NUMBERS", 20_000_000)
    with pytest.raises(ConversionRefused, match="makes more than .* numbers.*: pass "):
        make_proxy(VitsConfig())


def test_a_model_for_large_pictures_is_not_given_up():
    """Its windows fit no small picture. Of the published models it makes the most numbers."""
    heads = [6, 12, 24, 48]
    depths = [2, 2, 18, 2]
    sizes = {"embed_dim": 192, "window_size": 12, "image_size": 384}
    proxy = make_proxy(SwinConfig(num_heads=heads, depths=depths, **sizes))
    assert proxy.factor > 1


def test_inputs_that_do_not_fit_are_the_reason():
    what = "does not run on these inputs .*: pass inputs="
    with pytest.raises(ConversionRefused, match=what):
        make_proxy(config_of("gpt2"), inputs=lambda model: {"words": torch.zeros(1, 2)})


def test_models_of_the_base_mapping_are_made_by_their_class():
    assert make_proxy(config_of("vit"), model_class=ViTModel).name == "ViTModel"
    config = config_of("gpt2")
    config.architectures = ["GPT2Model"]
    assert make_proxy(config).name == "GPT2Model"

"""Proxy models of published configs: they run, keep the structure, and their norms can
be told from a sign.
"""

from transformers import (
    CLIPConfig,
    LlavaConfig,
    PersimmonConfig,
    PhimoeConfig,
    SiglipConfig,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from hf_rmsnorm.conversion.proxy import model as proxy_module
from hf_rmsnorm.conversion.proxy.discover import discover
from hf_rmsnorm.conversion.proxy.model import make_proxy
from hf_rmsnorm.conversion.proxy.shrink import POSITIONS

TEXT = {"num_hidden_layers": 2, "vocab_size": 96, "max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 4096,
    "short_mscale": 1.25,
    "long_mscale": 1.25,
    "short_factor": [1.0 + i / 8 for i in range(64)],
    "long_factor": [1.0 + i for i in range(64)],
}


def test_lists_of_longrope_are_as_long_as_the_narrow_heads_need():
    sizes = {
        "hidden_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 640,
    }
    more = {
        "num_local_experts": 2,
        "max_position_embeddings": 131072,
        "rope_parameters": LONGROPE,
    }
    proxy = make_proxy(PhimoeConfig(**{**TEXT, **sizes, **more}))
    size = proxy.config.hidden_size // 4
    factors = proxy.config.rope_parameters
    assert proxy.factor > 1
    assert len(factors["short_factor"]) == len(factors["long_factor"])
    assert len(factors["long_factor"]) == size // 2
    assert factors["short_factor"] == LONGROPE["short_factor"][:: proxy.factor]


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


def test_a_proxy_that_hears_is_given_little_sound():
    """Attention over the 1500 places of thirty seconds, in float64 and kept for
    gradients, takes 70 GB in 32 layers.
    """
    layers = {"encoder_layers": 1, "decoder_layers": 1, "decoder_start_token_id": 1}
    config = WhisperConfig(
        d_model=128, encoder_attention_heads=2, decoder_attention_heads=2, **layers
    )
    proxy = make_proxy(config, model_class=WhisperForConditionalGeneration)
    assert proxy.factor > 1
    assert proxy.inputs["input_features"].shape[-1] == 2 * POSITIONS


def test_a_model_of_two_towers_gets_texts_and_images():
    tower = {"hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 256}
    vision = {**tower, "num_hidden_layers": 2, "image_size": 56, "patch_size": 14}
    proxy = make_proxy(
        SiglipConfig(text_config={**TEXT, **tower}, vision_config=vision)
    )
    assert {"input_ids", "pixel_values"} <= proxy.inputs.keys()
    plan = discover(proxy)
    assert [n.path for n in plan.norms if not n.becomes_rms] == [
        "vision_model.head.layernorm"
    ]
    config = CLIPConfig(
        text_config={**TEXT, **tower}, vision_config=vision, projection_dim=64
    )
    assert {"input_ids", "pixel_values"} <= make_proxy(config).inputs.keys()


def test_a_model_that_holds_tokens_free_for_images_gets_texts():
    text = {**TEXT, "model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2}
    vision = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "model_type": "clip_vision_model",
    }
    config = LlavaConfig(text_config=text, vision_config=vision, image_token_index=90)
    assert "pixel_values" not in make_proxy(config).inputs

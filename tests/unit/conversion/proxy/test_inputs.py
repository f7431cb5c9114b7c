"""The inputs that are made for a proxy: texts, images and sound, as its model takes
them.
"""

from transformers import (
    CLIPConfig,
    LlavaConfig,
    MgpstrConfig,
    MgpstrForSceneTextRecognition,
    SiglipConfig,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from hf_rmsnorm.conversion.proxy.discover import discover
from hf_rmsnorm.conversion.proxy.model import make_proxy
from hf_rmsnorm.conversion.proxy.shrink import POSITIONS

TEXT = {"num_hidden_layers": 2, "vocab_size": 96, "max_position_embeddings": 32}


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


def test_a_picture_is_as_high_and_wide_as_the_config_says():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    letters = {"num_character_labels": 5, "num_bpe_labels": 5, "max_token_length": 3}
    config = MgpstrConfig(
        image_size=[8, 16], num_wordpiece_labels=5, **sizes, **letters
    )
    proxy = make_proxy(config, model_class=MgpstrForSceneTextRecognition)
    assert proxy.inputs["pixel_values"].shape[-2:] == (8, 16)

"""A picture among the tokens of a text."""

import torch
from transformers import InternVLConfig, InternVLForConditionalGeneration

from hf_rmsnorm.verification.pictures import with_picture

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}


def test_a_picture_is_as_high_and_wide_as_the_config_says():
    vision = {**SIZES, "image_size": (32, 32), "patch_size": (8, 8)}
    text = {**SIZES, "model_type": "qwen2", "num_key_value_heads": 2, "vocab_size": 128}
    parts = {"vision_config": vision, "text_config": text}
    model = InternVLForConditionalGeneration(InternVLConfig(**parts, image_token_id=99))
    inputs = with_picture(model.eval(), {"input_ids": torch.arange(16).view(2, 8)})
    assert inputs["pixel_values"].shape == (1, 3, 32, 32)
    assert (inputs["input_ids"] == 99).any()

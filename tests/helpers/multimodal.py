"""Tiny random models that read text and pictures, with positions of three axes: time,
height and width.
"""

import tiny_models
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

_TOKENS = {
    "image_token_id": 120, "video_token_id": 121, "vision_start_token_id": 122,
    "vision_end_token_id": 123, "image_start_token_id": 122, "image_end_token_id": 123,
    "video_start_token_id": 124, "video_end_token_id": 125,
}  # fmt: skip
_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "embed_dim": 32,
    "num_heads": 2,
    "intermediate_size": 48,
    "out_hidden_size": 64,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0],
    "num_position_embeddings": 16,
    "window_size": 16,
    "image_size": 16,
    "in_channels": 3,
    "in_chans": 3,
}
_ROTATION = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
FAMILIES = {
    "qwen2_vl": {"hidden_size": 64},
    "qwen2_5_vl": {},
    "qwen3_vl": {},
    "qwen3_5": {},
    "glm4v": {},
}


def build(family: str, dtype: torch.dtype = torch.bfloat16):
    """A model of the family in eval mode, the same each time."""
    text = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "head_dim": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_parameters": dict(_ROTATION),
        "tie_word_embeddings": False,
    }
    if family == "qwen3_5":
        text |= _LINEAR
    vision = _VISION | FAMILIES[family]
    configs = {"text_config": text, "vision_config": vision}
    config = AutoConfig.for_model(family, **configs, **_TOKENS)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        tiny_models.train_norms(model)
    return model.to(dtype).eval()


def positions(batch: int = 2, length: int = 12) -> torch.Tensor:
    """(3, batch, length): the axes differ, as in a picture."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 100, (3, batch, length), generator=generator)

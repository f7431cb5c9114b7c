"""A random picture among the tokens of a text, for models that read both; and which
batches hold text alone.
"""

import inspect

import torch

from .context import output_tensors

_PICTURES = (
    "pixel_values",
    "pixel_values_videos",
    "image_grid_thw",
    "video_grid_thw",
    "position_ids",
)
_SIDE = 2  # of a picture, in merged patches


def with_picture(model, text: dict) -> dict | None:
    """A row of `text` with a picture in it; None where the model takes none among its
    tokens, or refuses this one.

    Args:
        text: what `default_inputs` returns.
    """
    names = inspect.signature(model.forward).parameters
    if "pixel_values" not in names or "input_ids" not in text:
        return None
    try:
        token = _image_token(model.config)
        picture = _patches(model) if "image_grid_thw" in names else _pixels(model)
        ids = _among(text["input_ids"], token, _count(model, picture))
        inputs = {**text, **picture, "input_ids": ids}
        if "mm_token_type_ids" in names:
            inputs["mm_token_type_ids"] = (ids == token).int()
        with torch.no_grad():
            model(**inputs)
    except Exception:
        # a model that lays pictures out in its own way is compared on text
        return None
    return inputs


def is_text_alone(model, batches: list[dict]) -> bool:
    """Whether a model whose tokens have positions of three axes was given text, in
    which the three are equal.
    """
    config = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        return False
    rotation = getattr(config.get_text_config(), "rope_parameters", None) or {}
    names = [name for batch in batches for name in batch]
    return "mrope_section" in rotation and not any(name in _PICTURES for name in names)


def _image_token(config) -> int:
    if hasattr(config, "image_token_id"):
        return config.image_token_id
    return config.image_token_index


def _among(ids: torch.Tensor, token: int, count: int) -> torch.Tensor:
    """The first row of token ids with a picture of `count` tokens in its middle."""
    middle = ids.shape[1] // 2
    image = torch.full((1, count), token, device=ids.device)
    return torch.cat([ids[:1, :middle], image, ids[:1, middle:]], dim=1)


def _patches(model) -> dict:
    """A picture as the Qwen-VL and GLM-V families read it: rows of patches, and how
    many there are along each axis.
    """
    vision = model.config.vision_config
    side = _SIDE * vision.spatial_merge_size
    channels = getattr(vision, "in_channels", 3)
    size = channels * vision.temporal_patch_size * vision.patch_size**2
    grid = torch.tensor([[1, side, side]], device=model.device)
    return {"pixel_values": _random(model, side * side, size), "image_grid_thw": grid}


def _pixels(model) -> dict:
    vision = model.config.vision_config
    channels = getattr(vision, "num_channels", 3)
    side = vision.image_size
    return {"pixel_values": _random(model, 1, channels, side, side)}


def _random(model, *shape: int) -> torch.Tensor:
    pixels = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return pixels.to(model.device, model.dtype)


def _count(model, picture: dict) -> int:
    """How many tokens a picture takes."""
    with torch.no_grad():
        features = model.get_image_features(**picture)
    features = getattr(features, "pooler_output", features)
    return sum(rows.numel() // rows.shape[-1] for rows in output_tensors(features))

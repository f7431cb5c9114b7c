"""A random picture among the tokens of a text, for models that read both."""

import inspect
from collections.abc import Callable

import torch

from .context import output_tensors, picture_size

_SIDE = 2  # of a picture, in merged patches
_PIXELS = 64  # of its side, where the config names none


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
        picture = _picture(model, in_patches="image_grid_thw" in names)
        count = count_features(model.get_image_features, picture)
        ids = _among(text["input_ids"], model.config, count)
        inputs = {**text, **picture, "input_ids": ids}
        if "mm_token_type_ids" in names:
            inputs["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
        with torch.no_grad():
            model(**inputs)
    except Exception:
        # a model that lays pictures out in its own way is compared on text
        return None
    return inputs


def _among(ids: torch.Tensor, config, count: int) -> torch.Tensor:
    """The first row of token ids with a picture of `count` tokens in its middle."""
    token = getattr(config, "image_token_id", None)
    if token is None:
        token = config.image_token_index
    row = ids[0]
    before, behind = row.chunk(2)
    return torch.cat([before, row.new_full((count,), token), behind])[None]


def _picture(model, in_patches: bool) -> dict:
    """Random pixels; in rows of patches, and how many there are along each axis, as the
    Qwen-VL and GLM-V families read them.
    """
    vision = model.config.vision_config
    picture = {}
    if in_patches:
        side = _SIDE * vision.spatial_merge_size
        channels = getattr(vision, "in_channels", 3)
        size = channels * vision.temporal_patch_size * vision.patch_size**2
        shape = side * side, size
        grid = torch.tensor([[1, side, side]])
        picture["image_grid_thw"] = grid.to(model.device)
    else:
        channels = getattr(vision, "num_channels", 3)
        shape = 1, channels, *picture_size(vision, default=_PIXELS)
    pixels = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    picture["pixel_values"] = pixels.to(model.device, model.dtype)
    return picture


def count_features(method: Callable, values: dict) -> int:
    """How many tokens the features take that a method of a model returns."""
    with torch.no_grad():
        features = method(**values)
    features = getattr(features, "pooler_output", features)
    count = 0
    for rows in output_tensors(features):
        count += rows.numel() // rows.shape[-1]
    return count

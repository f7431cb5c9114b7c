"""Pictures and sounds among the tokens of a text, for models that read both."""

import inspect
from collections.abc import Callable, Iterable, Iterator

import torch
from accelerate.utils import send_to_device

from .context import first_number, in_dtype_of, output_tensors, picture_shape

GRID = 4  # patches of a picture along each side, where a model takes them one by one


@torch.no_grad()
def with_picture(model, text: dict) -> dict | None:
    """A row of `text` with a picture in it; None where the model takes none among its
    tokens, or runs on none of those that are made here.

    Args:
        text: what `default_inputs` returns.
    """
    vision = getattr(model.config, "vision_config", None)
    if vision is None:
        return None
    for inputs in with_features(model, text, "image", random_pictures(vision)):
        try:
            model(**inputs)
        except Exception:
            # a model that lays pictures out in its own way is compared on text
            continue
        return inputs
    return None


def with_features(
    model: torch.nn.Module, inputs: dict, kind: str, choices: Iterable[dict]
) -> Iterator[dict]:
    """The inputs in one row, with what one of the choices gives a tower (`kind`:
    "image" or "audio"), whose features replace certain tokens.
    """
    names = inspect.signature(model.forward).parameters
    token = getattr(model.config, f"{kind}_token_id", None)
    token = getattr(model.config, f"{kind}_token_index", token)
    method = f"get_{kind}_features"
    features = getattr(model, method, None) or getattr(model.base_model, method, None)
    if token is None or features is None or "input_ids" not in inputs:
        return
    row = inputs["input_ids"].flatten()
    row = row[row != token]
    for values in choices:
        taken = {name: value for name, value in values.items() if name in names}
        taken = send_to_device(in_dtype_of(model, taken), row.device)
        try:
            count = _count_features(features, taken)
        except Exception:  # of sizes that do not suit it a tower may raise anything
            continue
        if not count:
            continue
        ids = torch.cat([row[:2], row.new_full((count,), token), row[2:]])[None]
        filled = {**inputs, **taken, "input_ids": ids}
        if "mm_token_type_ids" in names:
            filled["mm_token_type_ids"] = (ids == token).long()
        yield filled


def random_pictures(vision) -> Iterator[dict]:
    """Arguments for one picture, of the sizes in the config of a tower: whole, and as
    patches in a grid, as the Qwen-VL and GLM-V families read them.
    """
    channels, *size = picture_shape(vision, GRID * 8)
    picture = normal(1, channels, *size)
    yield {"pixel_values": picture}
    yield {"pixel_values": picture[None]}
    patch = first_number(vision, "patch_size", default=8)
    frames = first_number(vision, "temporal_patch_size", default=1)
    patches = normal(GRID * GRID, channels * patch * patch * frames)
    grid = torch.tensor([[1, GRID, GRID]])
    yield {"pixel_values": patches, "image_grid_thw": grid}


def normal(*shape: int) -> torch.Tensor:
    """Random numbers in float64, the same at each call."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@torch.no_grad()
def _count_features(method: Callable, values: dict) -> int:
    """How many tokens the features take that a method of a model returns."""
    features = method(**values)
    features = getattr(features, "pooler_output", features)
    return sum(rows.numel() // rows.shape[-1] for rows in output_tensors(features))

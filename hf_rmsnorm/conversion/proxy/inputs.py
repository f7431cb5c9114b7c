"""Random inputs that a proxy model runs on: texts, and what its towers for pictures and
sound take.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ...verification.context import TOKENS, default_inputs, is_float
from .run import MISFITS, run

GRID = 4  # patches of a picture along each side, where a model takes them one by one
FRAMES = 64  # of a sound


@dataclass(frozen=True)
class Tower:
    """A part of a model that reads pictures or sound; its features replace certain
    tokens.

    Args:
        configs: names that its config may have in the model's config.
        arguments: names that its input may have in the forward.
        method: of the model, which returns the features.
        tokens: names that the id of the replaced token may have in the model's config.
    """

    configs: tuple[str, ...]
    arguments: tuple[str, ...]
    method: str
    tokens: tuple[str, ...]


TOWERS = (
    Tower(
        configs=("vision_config",),
        arguments=("pixel_values",),
        method="get_image_features",
        tokens=("image_token_id", "image_token_index"),
    ),
    Tower(
        configs=("audio_config", "encoder_config"),
        arguments=("input_features", "input_values"),
        method="get_audio_features",
        tokens=("audio_token_id", "audio_token_index"),
    ),
)


def made_inputs(model: torch.nn.Module, tokens: tuple[int, int] = TOKENS) -> dict:
    """Inputs for a float64 model that it runs on, through each tower that inputs can be
    made for.

    If it runs on none, the error of the first is raised. `tokens` are rows of text and
    their length.
    """
    inputs = _first_that_runs(model, _texts(model, tokens))
    for tower in TOWERS:
        try:
            inputs = _first_that_runs(model, _with_tower(model, inputs, tower))
        except MISFITS:
            # nothing can be made for it: its norms are counted as not reached
            continue
    return inputs


def _first_that_runs(model: torch.nn.Module, choices: Iterator[dict]) -> dict:
    first: Exception | None = None
    for inputs in choices:
        inputs = {
            name: value.double() if is_float(value) else value
            for name, value in inputs.items()
        }
        try:
            run(model, inputs)
        except MISFITS as error:
            first = first or error
            continue
        return inputs
    raise first or ValueError("no input is known for it")


def _texts(model: torch.nn.Module, tokens: tuple[int, int]) -> Iterator[dict]:
    inputs = default_inputs(model, tokens)
    yield inputs
    codebooks = getattr(model.config, "num_codebooks", None)
    if isinstance(codebooks, int) and "input_ids" in inputs:
        yield {
            **inputs,
            "input_ids": inputs["input_ids"].repeat_interleave(codebooks, 0),
        }
        yield {
            **inputs,
            "input_ids": inputs["input_ids"][..., None].repeat(1, 1, codebooks),
        }


def _with_tower(model: torch.nn.Module, inputs: dict, tower: Tower) -> Iterator[dict]:
    """The inputs with one for the tower besides, in each way that models take such."""
    names = inspect.signature(model.forward).parameters
    part = _first_of(model.config, tower.configs)
    token = _first_of(model.config, tower.tokens)
    argument = next((name for name in tower.arguments if name in names), None)
    if (
        part is None
        or token is None
        or argument is None
        or argument in inputs
        or "input_ids" not in inputs
    ):
        return
    row = inputs["input_ids"].reshape(1, -1)
    row = torch.where(row == token, (row + 1) % row.max(), row)
    for values in (
        _pictures(part) if argument == "pixel_values" else _sounds(part, argument)
    ):
        values = {name: value for name, value in values.items() if name in names}
        count = _count_features(model, tower, values)
        if not count:
            continue
        places = torch.full((1, count), token)
        with_places = torch.cat([row[:, :2], places, row[:, 2:]], dim=1)
        filled = {**inputs, **values, "input_ids": with_places}
        yield filled
        if "mm_token_type_ids" in names:
            yield {**filled, "mm_token_type_ids": (with_places == token).long()}


def _first_of(config, names: tuple[str, ...]):
    """The first of these attributes that a config has, and that is not None."""
    return next(
        (value for name in names if (value := getattr(config, name, None)) is not None),
        None,
    )


def _count_features(model: torch.nn.Module, tower: Tower, values: dict) -> int:
    """How many rows a tower makes of its inputs; 0 where it does not take them."""
    method = getattr(model, tower.method, None) or getattr(
        model.base_model, tower.method, None
    )
    if method is None:
        return 0
    wide = {
        name: value.double() if is_float(value) else value
        for name, value in values.items()
    }
    try:
        with torch.no_grad():
            features = method(**wide)
    except MISFITS:
        return 0
    features = getattr(features, "pooler_output", features)
    tensors = features if isinstance(features, (list, tuple)) else [features]
    return sum(t.flatten(0, -2).shape[0] for t in tensors if is_float(t))


def _pictures(part) -> Iterator[dict]:
    """Arguments for one picture: whole, and as patches in a grid."""
    normal = _normal()
    channels = _number(part, "num_channels", "in_channels", "in_chans", default=3)
    size = _number(part, "image_size", "img_size", default=GRID * 8)
    picture = normal(1, channels, size, size)
    yield {"pixel_values": picture}
    yield {"pixel_values": picture[None]}
    patch = _number(part, "patch_size", default=8)
    row = channels * patch * patch * _number(part, "temporal_patch_size", default=1)
    yield {
        "pixel_values": normal(GRID * GRID, row),
        "image_grid_thw": torch.tensor([[1, GRID, GRID]]),
    }


def _sounds(part, argument: str) -> Iterator[dict]:
    """Arguments for one sound: its waveform, or its spectrogram with and without a
    mask.
    """
    normal = _normal()
    if argument == "input_values":
        yield {"input_values": normal(1, 4000)}
        return
    bins = _number(part, "num_mel_bins", "n_mels", "input_dim", default=80)
    positions = _number(part, "max_source_positions", default=0)
    for frames in filter(None, (2 * positions, FRAMES)):
        mask = torch.ones(1, frames, dtype=torch.long)
        for features in (normal(1, bins, frames), normal(1, frames, bins)):
            yield {
                "input_features": features,
                "feature_attention_mask": mask,
                "input_features_mask": mask,
            }
            yield {"input_features": features}


def _normal():
    generator = torch.Generator().manual_seed(3)
    return lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)


def _number(part, *names: str, default: int) -> int:
    for name in names:
        value = getattr(part, name, None)
        value = value[0] if isinstance(value, (list, tuple)) and value else value
        if isinstance(value, int):
            return value
    return default

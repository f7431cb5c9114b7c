"""Random inputs that a proxy model runs on: texts, what its towers for pictures and
sound take, and states of an encoder.
"""

import inspect
from collections.abc import Iterator

import torch

from ...verification.context import (
    TOKENS,
    default_inputs,
    first_number,
    picture_size,
)
from ...verification.pictures import count_features
from .run import MISFITS, run

GRID = 4  # patches of a picture along each side, where a model takes them one by one
FRAMES = 64  # of a sound
STATES = 7  # of an encoder


@torch.no_grad()
def made_inputs(model: torch.nn.Module, tokens: tuple[int, int] = TOKENS) -> dict:
    """Inputs for a float64 model that it runs on, through each tower that inputs can be
    made for.

    `tokens` are rows of text and their length.
    """
    inputs = default_inputs(model, tokens)
    run(model, inputs)
    config = model.config
    sound = getattr(config, "encoder_config", None)
    towers = (
        ("image", getattr(config, "vision_config", None), _pictures),
        ("audio", getattr(config, "audio_config", sound), _sounds),
    )
    for kind, part, make in towers:
        if part is not None:
            choices = _with_tower(model, inputs, kind, make(part))
            inputs = _first_that_runs(model, choices, inputs)
    return _first_that_runs(model, _with_encoder(model, inputs), inputs)


def _first_that_runs(model, choices: Iterator[dict], inputs: dict) -> dict:
    """The first of the choices on which the model runs; else these inputs, as a tower
    that no input is made for counts as not reached.
    """
    for choice in choices:
        try:
            run(model, choice)
        except MISFITS:
            continue
        return choice
    return inputs


def _with_tower(
    model: torch.nn.Module, inputs: dict, kind: str, choices: Iterator[dict]
) -> Iterator[dict]:
    """The inputs with one for a tower, whose features replace certain tokens."""
    names = inspect.signature(model.forward).parameters
    token = getattr(model.config, f"{kind}_token_id", None)
    token = getattr(model.config, f"{kind}_token_index", token)
    method = f"get_{kind}_features"
    owner = model if hasattr(model, method) else model.base_model
    features = getattr(owner, method, None)
    if token is None or features is None or "input_ids" not in inputs:
        return
    row = inputs["input_ids"].flatten()
    row = row[row != token]
    for values in choices:
        taken = {name: value for name, value in values.items() if name in names}
        try:
            count = count_features(features, taken)
        except MISFITS:
            continue
        if not count:
            continue
        ids = torch.cat([row[:2], torch.full((count,), token), row[2:]])[None]
        filled = {**inputs, **taken, "input_ids": ids}
        if "mm_token_type_ids" in names:
            filled["mm_token_type_ids"] = (ids == token).long()
        yield filled


def _pictures(part) -> Iterator[dict]:
    """Arguments for one picture: whole, and as patches in a grid."""
    channels = first_number(part, "num_channels", "in_channels", "in_chans", default=3)
    picture = _normal(1, channels, *picture_size(part, default=GRID * 8))
    yield {"pixel_values": picture}
    yield {"pixel_values": picture[None]}
    patch = first_number(part, "patch_size", default=8)
    frames = first_number(part, "temporal_patch_size", default=1)
    row = channels * patch * patch * frames
    grid = torch.tensor([[1, GRID, GRID]])
    yield {"pixel_values": _normal(GRID * GRID, row), "image_grid_thw": grid}


def _sounds(part) -> Iterator[dict]:
    """Arguments for one sound: its waveform, or its spectrogram with and without a
    mask.
    """
    yield {"input_values": _normal(1, 4000)}
    bins = first_number(part, "num_mel_bins", "n_mels", "input_dim", default=80)
    positions = first_number(part, "max_source_positions", default=0)
    for frames in (2 * positions, FRAMES):
        mask = torch.ones(1, frames, dtype=torch.long)
        masks = {"feature_attention_mask": mask, "input_features_mask": mask}
        for shape in ((1, bins, frames), (1, frames, bins)):
            features = _normal(*shape)
            yield {"input_features": features, **masks}
            yield {"input_features": features}


def _with_encoder(model: torch.nn.Module, inputs: dict) -> Iterator[dict]:
    """The inputs with states for the cross-attention of a decoder without its encoder."""
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        return
    names = inspect.signature(model.forward).parameters
    if names.keys().isdisjoint(("encoder_hidden_states", "encoder_outputs")):
        return
    first = next(iter(inputs.values()))
    states = _normal(len(first), STATES, config.get_text_config().hidden_size)
    if "encoder_hidden_states" in names:
        yield {**inputs, "encoder_hidden_states": states}
    if "encoder_outputs" in names:
        yield {**inputs, "encoder_outputs": (states,)}


def _normal(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(shape, generator=generator, dtype=torch.float64)

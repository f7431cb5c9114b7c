"""Random inputs that a proxy model runs on: texts, what its towers for pictures and
sound take, and states of an encoder. `make_proxy` asks.
"""

import inspect
from collections.abc import Iterator

import torch

from ...verification.context import TOKENS, default_inputs, first_number
from ...verification.pictures import normal, random_pictures, with_features
from .run import MISFITS, run

FRAMES = 64  # of a sound
STATES = 7  # of an encoder


@torch.no_grad()
def make_inputs(model: torch.nn.Module) -> dict:
    """Inputs for a float64 model that it runs on, through each tower that inputs can be
    made for.
    """
    inputs = default_inputs(model, TOKENS)
    run(model, inputs)
    config = model.config
    sound = getattr(config, "encoder_config", None)
    towers = (
        ("image", getattr(config, "vision_config", None), random_pictures),
        ("audio", getattr(config, "audio_config", sound), _sounds),
    )
    for kind, part, make in towers:
        if part is not None:
            choices = with_features(model, inputs, kind, make(part))
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


def _sounds(part) -> Iterator[dict]:
    """Arguments for one sound: its waveform, or its spectrogram with and without a
    mask.
    """
    yield {"input_values": normal(1, 4000)}
    bins = first_number(part, "num_mel_bins", "n_mels", "input_dim", default=80)
    positions = first_number(part, "max_source_positions", default=0)
    for frames in (2 * positions, FRAMES):
        mask = torch.ones(1, frames, dtype=torch.long)
        masks = {"feature_attention_mask": mask, "input_features_mask": mask}
        for shape in ((1, bins, frames), (1, frames, bins)):
            features = normal(*shape)
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
    states = normal(len(first), STATES, config.get_text_config().hidden_size)
    if "encoder_hidden_states" in names:
        yield {**inputs, "encoder_hidden_states": states}
    if "encoder_outputs" in names:
        yield {**inputs, "encoder_outputs": (states,)}

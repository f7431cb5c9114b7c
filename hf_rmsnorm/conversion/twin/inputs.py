"""Random inputs for a model, by what its config and its forward's signature say."""

from __future__ import annotations

import inspect

import torch
from transformers import PretrainedConfig, PreTrainedModel

from ...verification.context import max_positions

TOKENS = (2, 24)  # rows and their length
VOCABULARY_IF_UNKNOWN = 64


def default_inputs(model: PreTrainedModel, seed: int = 0, tokens: tuple[int, int] = TOKENS) -> dict:
    """Keyword arguments: random token ids, pixels or audio, by the names in the forward's signature.

    Raises:
        ValueError: the main input has a name that nothing is known of.
    """
    generator = torch.Generator().manual_seed(seed)
    config, names = model.config, inspect.signature(model.forward).parameters
    tokens = (tokens[0], min(tokens[1], max_positions(config)))
    main = getattr(model, "main_input_name", None) or next(iter(names))

    def number(*keys: str, default: int) -> int:
        for part in (config, *(v for v in vars(config).values() if isinstance(v, PretrainedConfig))):
            for key in keys:
                value = getattr(part, key, None)
                if isinstance(value, (list, tuple)) and value:
                    value = value[0]
                if isinstance(value, int) and value:
                    return value
        return default

    def ids():
        special = {v for k, v in vars(config).items() if k.endswith("_id") and isinstance(v, int)}
        vocabulary = number("vocab_size", default=VOCABULARY_IF_UNKNOWN)
        free = torch.tensor([i for i in range(vocabulary) if i not in special and i > 2] or list(range(vocabulary)))
        return free[torch.randint(len(free), tokens, generator=generator)]

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    rows = tokens[0]
    if main == "input_ids":
        inputs = {main: ids()}
    elif main == "pixel_values":
        side = number("image_size", default=64)
        inputs = {main: normal(rows, number("num_channels", "in_channels", default=3), side, side)}
    elif main == "input_values":
        inputs = {main: normal(rows, 4000)}
    elif main == "input_features":
        length = 2 * number("max_source_positions", default=50)
        inputs = {main: normal(rows, number("num_mel_bins", "input_feat_per_channel", default=80), length)}
    else:
        raise ValueError(f"nothing is known of the input {main!r}")
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in names:
        inputs["decoder_input_ids"] = ids()
    if "use_cache" in names or any(p.kind is p.VAR_KEYWORD for p in names.values()):
        inputs["use_cache"] = False
    return inputs

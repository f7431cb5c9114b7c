"""How many tokens a model takes."""

from __future__ import annotations

import sys


def max_positions(config) -> int:
    """The most tokens that a model of this config takes; `sys.maxsize` where that is not said."""
    text = config.get_text_config()
    found = [getattr(text, key, None) for key in ("max_position_embeddings", "n_positions", "max_seq_len")]
    return min((value for value in found if isinstance(value, int) and value > 0), default=sys.maxsize)


def prompt_length(config, tokens: int, new_tokens: int) -> int:
    """How many of `tokens` to give where `new_tokens` are then to be generated; half of a context that is too short."""
    most = max_positions(config)
    return max(1, min(tokens, max(most - new_tokens, most // 2)))

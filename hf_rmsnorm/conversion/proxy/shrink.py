"""Smaller configs of the same structure: equal depth, heads, experts and flags,
narrower in every width. `make_proxy` tries them until a model of one runs.
"""

import copy
import math
import re
from collections.abc import Iterator
from itertools import starmap

from transformers import PretrainedConfig

VOCABULARY = 96
POSITIONS = 96
IMAGE_PATCHES = 4  # along each side; even, as some models join 2 x 2 of them
# pixels along a side, where patches may not be few or have no size; windows of Swin want
# a power of two
PICTURE = 256
WINDOW = 8  # patches along a side that attend to each other
INNER = 24  # width inside an MLP: nothing of the structure hangs on it

_NO_WIDTH = re.compile(
    r"^(num|max|n)_(?!embd|inner)|layers?$|(?<!^d_)heads?$|embeddings$|ratio|factor|dropout|act|size_per"
)
_INNER = re.compile(r"intermediate|ffn|d_?ff$|inner|mlp|feed_?forward")
_WIDTH = re.compile(
    r"hidden|embd|embed|d_model|dim|width|d_kv|rank|head_size|d_head|rotary|projection_size"
)
_TOKEN = re.compile(r"tok(en)?_(id|index)s?$")
# The first that a name matches says how large a number may be.
_MOST = {
    r"vocab_size$|^vocab_size": VOCABULARY,
    r"^window_size$": WINDOW,
    r"max_(source_|target_)?position|n_positions|n_ctx|max_seq|seq_len|block_size$|^attention_window$": POSITIONS,
}
_HEADS = (
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "encoder_attention_heads",
    "decoder_attention_heads",
)
_HIDDEN = ("hidden_size", "d_model", "n_embd", "embed_dim", "hidden_sizes")


def shrunk(config: PretrainedConfig) -> Iterator[tuple[int, PretrainedConfig]]:
    """(what its widths were divided by, a narrower copy) in several styles, the
    likeliest first.

    Which attribute is a width is read from its name and its value. Whether a copy is a
    model at all, and one of the same structure, is for the caller to find out.
    """
    divisor = math.gcd(*_head_sizes(config))
    factors = [f for f in range(1, divisor // 2 + 1) if divisor % f == 0]
    # With half a pair of rotated channels a head would get another number of them.
    for share in _rotated_shares(config):
        whole = [f for f in factors if round(divisor / f * share, 6) % 2 == 0]
        factors = whole or factors
    # Eight channels a head leave room for partial rotary embeddings and cost little.
    for factor in sorted(factors, key=lambda f: abs(math.log2(divisor / f / 8))):
        for inner, pictures in ((True, True), (False, True), (False, False)):
            narrow = copy.deepcopy(config)
            yield factor, _narrow(narrow, factor, inner, pictures)


def _head_sizes(config: PretrainedConfig) -> list[int]:
    """The sizes of a head, or of the stream where no heads are named, in each part of a
    config.
    """
    sizes = []
    for part in _parts(config):
        # under their own names; a config may refuse to give some as attributes
        values = vars(part)
        heads = _first(values, _HEADS)
        hidden = _first(values, _HIDDEN)
        if heads and hidden % heads == 0:
            hidden //= heads
        sizes += [_first(values, ("head_dim", "d_head")), hidden]
    return [size for size in sizes if size] or [1]


def _rotated_shares(config: PretrainedConfig) -> list[float]:
    """The shares of a head's channels that parts of a config rotate, where not all."""
    shares = []
    for part in _parts(config):
        rope = getattr(part, "rope_parameters", None) or {}
        own = getattr(part, "partial_rotary_factor", None)  # before Transformers 5
        shares.append(rope.get("partial_rotary_factor") or own)
    return [share for share in shares if share]


def _first(values: dict, names: tuple[str, ...]) -> int:
    """The first of these that is a number above 0; 0 if there is none.

    A list has a number for each stage: of one, the divisor that all have in common.
    """
    for name in names:
        value = values.get(name)
        stages = value if isinstance(value, (list, tuple)) else [value]
        if all(type(size) is int for size in stages) and any(stages):
            return math.gcd(*stages)
    return 0


def _parts(config: PretrainedConfig) -> list[PretrainedConfig]:
    """A config and all configs in it."""
    parts = [config]
    for value in vars(config).values():
        if isinstance(value, PretrainedConfig):
            parts += _parts(value)
    return parts


def _narrow(
    config: PretrainedConfig, factor: int, inner: bool, pictures: bool
) -> PretrainedConfig:
    for part in _parts(config):
        patch = vars(part).get("patch_size") if pictures else None
        for name, value in list(vars(part).items()):
            if name.startswith("_") and name != "_max_position_embeddings":
                continue
            # past validators, which would see some widths narrowed and some not
            vars(part)[name] = _narrow_value(name, value, factor, inner)
            if name == "image_size":
                vars(part)[name] = _picture(value, patch)
    return config


def _picture(size, patch):
    """The size of a smaller picture; some configs list the height and the width."""
    if isinstance(size, (list, tuple)):
        patches = patch if type(patch) is type(size) else [patch] * len(size)
        return type(size)(starmap(_picture, zip(size, patches, strict=True)))
    if type(size) is not int:
        return size
    most = PICTURE
    if type(patch) is int:
        most = max(IMAGE_PATCHES * patch, 2 * WINDOW)
    return min(size, most)


def _narrow_value(name: str, value, factor: int, inner: bool):
    """A number, a list of them or the settings of a rotary embedding, narrowed; all
    else as it is.
    """
    if type(value) is int:
        return _number(name, value, factor, inner)
    if name.startswith("rope") and isinstance(value, dict):
        return _rotation(value, factor)
    if isinstance(value, (list, tuple)) and all(type(v) is int for v in value):
        return type(value)(_number(name, v, factor, inner) for v in value)
    return value


def _rotation(values: dict, factor: int) -> dict:
    """Settings of a rotary embedding, some by type of layer; longrope lists a factor
    for each pair of channels.
    """
    narrow = dict(values)
    for name, value in values.items():
        if isinstance(value, dict):
            narrow[name] = _rotation(value, factor)
        elif isinstance(value, list) and name.endswith("_factor"):
            narrow[name] = value[::factor]
    return narrow


def _number(name: str, value: int, factor: int, inner: bool) -> int:
    if _TOKEN.search(name):
        return value if value < VOCABULARY else value % VOCABULARY
    for pattern, most in _MOST.items():
        if re.search(pattern, name):
            return min(value, most)
    if _NO_WIDTH.search(name) or value < 2:
        return value
    if _INNER.search(name):
        return min(value, INNER) if inner else max(1, value // factor)
    if _WIDTH.search(name) and value % factor == 0:
        return value // factor
    return value

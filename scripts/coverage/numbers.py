"""How numbers in a config are shrunk, by the names of their attributes."""

from __future__ import annotations

import re
from typing import Any

VOCABULARY = 128

# What to do with a scalar, by its name; the first pattern that matches decides. Numbers
# are upper limits.
SCALARS: list[tuple[re.Pattern, Any]] = [
    (re.compile(pattern), action)
    for pattern, action in (
        (r"layer_offset|kv_shared_layers", 0),
        (r"upsample_groups", 64),
        (r"rotary_dim$", 8),
        (r"(^|_)n_?groups$", 2),
        (
            r"xpath|kernel|stride|dilation|channels?$|rate$|ratio|factor|_bins$|_offset$|dropout|groups?_norm",
            "keep",
        ),
        (r"vocab|codebook_size|num_embeddings|num_hash_buckets", VOCABULARY),
        (
            r"experts_per_tok|moe_k$|moe_top_?k|router_topk|^top_k$|num_selected_experts|topk_experts",
            2,
        ),
        (r"experts?$|num_local_experts|n_routed_experts|moe_num_experts", 4),
        (r"^n_group$", 2),
        (r"^topk_group$", 1),
        (r"dense_replace|dense_layers|first_k|num_dense", 1),
        (
            r"interval|every_n|layer_period|layer_group_size|sparse_step|sliding_window_pattern|layer_freq",
            2,
        ),
        (r"key_value_heads|kv_heads|num_key_heads|query_groups", 2),
        (r"heads?$|num_value_heads", 4),
        (r"(head_(dim|size)|d_kv|dim_head|rope_dim|d_head)$|_head_dim", 16),
        (r"lora_rank|_rank$", 16),
        (r"state_(size|dim)|d_state", 16),
        (r"chunk_size|block_size", 16),
        (r"(^|_)(layers?|n_layers?|depth|blocks|cycles)$|num_.*_layers$", 2),
        (
            r"intermediate|ffn|d_?ff$|dim_ff|feed_?forward|n_inner|mlp_(dim|size)|mlp_hidden",
            96,
        ),
        (r"image_size|input_size|img_size|spec_size", 32),
        (r"^(vision_)?patch_size$", 8),
        (r"position|n_ctx|seq_len|block_len|max_length|num_queries|num_latents", 128),
        (r"window", 16),
        (r"index_topk", 8),
        (r"hidden|d_model|n_embd|embed|(^|_)(width|dim|size)$|_dim$", 64),
    )
]
WIDTH = re.compile(
    r"hidden|intermediate|ffn|d_?ff$|dim|d_model|n_embd|embed|width|channels?$|inner|feed_?forward|d_head"
)
LAYER_INDICES = re.compile(
    r"layers$|idxs|indic|index|layer_ids|hook_ids|deepstack|layer_id$|feature_layer"
)

# How numbers are shrunk: to fixed sizes; these, and None filled in too; widths divided
# by a common number; not at all.
STYLES = ("fixed", "filled", "divide8", "default")
FIXED = ("fixed", "filled")
DIVISOR = 8


def shrunk_list(style: str, name: str, value, layers: tuple[int, int] | None):
    """The list of an attribute in the tiny config; `layers`: (depth by default, depth
    to build).
    """
    if style == "default":
        return value
    depth, kept = layers or (None, None)
    if layers and all(map(_is_repeated, value)):
        return type(value)([v[0], max(1, v[1] * kept // depth)] for v in value)
    integers = all(isinstance(v, int) and not isinstance(v, bool) for v in value)
    if integers and LAYER_INDICES.search(name) and not _is_one_a_layer(value, depth):
        return _layer_indices(style, name, value, layers)
    if depth is not None and len(value) == depth and depth > 4:
        value = _of_each_kind(value, kept)
    return _sizes(style, name, value) if integers else value


def _is_repeated(entry) -> bool:
    """Whether an entry is (kind, how many layers of it)."""
    return isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], int)


def _layer_indices(style: str, name: str, value, layers: tuple[int, int] | None):
    if layers is not None:
        depth, kept = layers
        mapped = [i * kept // depth if i >= 0 else max(i, -kept) for i in value]
        return type(value)(sorted(set(mapped)) if len(value) > kept else mapped)
    if style in FIXED and "layer" in name:  # of a part: it has two layers
        return type(value)(max(v, -2) if v < 0 else int(v == max(value)) for v in value)
    return value


def _sizes(style: str, name: str, value):
    if re.search(r"depths|num_block|blocks|repeats|layers$", name):
        return type(value)(min(v, 2) for v in value)
    if name.endswith("in_channels") and len(set(value)) == 1 and style in FIXED:
        return type(value)(min(v, 64) for v in value)
    if WIDTH.search(name) and max(value) >= 32:
        return type(value)(_divided(v, least=16) for v in value)
    return value


def shrunk_number(
    style: str, name: str, value: int, layers: tuple[int, int] | None
) -> int:
    """The number of an attribute in the tiny config; `layers`: (depth by default, depth
    to build).
    """
    if style == "default" or value <= 0:
        return value
    action = action_of(name)
    if layers is not None:
        depth, kept = layers
        if action == 2 and value == depth:
            return kept
        index = LAYER_INDICES.search(name) and "size" not in name
        if action == "keep" and index:
            return min(value, kept - 1)
    if action == "keep":
        return value
    if style == "divide8":
        if action in (64, 96, 16) and WIDTH.search(name):
            return _divided(value, least=4 * DIVISOR)
        if _stays_in_division(name, action):
            return value
    return min(value, action)


def _stays_in_division(name: str, action: int) -> bool:
    """Whether a number is no width, where widths alone are divided."""
    if action == 2:
        return "heads" in name
    return action in (32, 8, 4) and "expert" not in name


def _divided(value: int, least: int) -> int:
    """A width divided, if it has at least this size and the result is whole."""
    if value % DIVISOR or value < least:
        return value
    return value // DIVISOR


def action_of(name: str) -> int | str:
    """The number that a number of this name is shrunk to, or "keep"."""
    return next((action for pattern, action in SCALARS if pattern.search(name)), "keep")


def layers_to_reach(pattern: list[str] | tuple[str, ...]) -> int:
    """How many layers it takes to have each kind of the pattern; a second of each if
    that is near.
    """
    places = [
        [i for i, kind in enumerate(pattern) if kind == wanted]
        for wanted in set(pattern)
    ]
    # layers of one kind may share their weights
    second = max(indices[:2][-1] for indices in places)
    return 1 + (second if second < 12 else max(indices[0] for indices in places))


def _is_one_a_layer(value: list | tuple, depth: int | None) -> bool:
    return depth is not None and len(value) == depth and max(value) < depth - 1


def _of_each_kind(value: list | tuple, count: int) -> list | tuple:
    """So many entries, the first of each kind among them."""
    kinds = list(dict.fromkeys(map(repr, value)))
    chosen = [next(v for v in value if repr(v) == kind) for kind in kinds][:count]
    return type(value)((chosen * count)[:count])

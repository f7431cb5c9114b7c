"""Tiny configs of any type in Transformers, made from the type's config class by the
names of its attributes.

Widths, depths, head counts and vocabularies are recognised by name. What a type needs
besides is in `scripts/data/config_hints.json`: by type values of attributes, as
"Class.attribute".
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import is_timm_available

DATA = Path(__file__).resolve().parents[1] / "data/config_hints.json"
HINTS: dict[str, dict] = json.loads(DATA.read_text(encoding="utf-8"))
VOCABULARY = 128
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SPECIAL |= {"decoder_start_token_id": 1}
TOKEN_ID = re.compile(r"(tok(en)?_(id|index)s?|_token_id_\w+)$")
LEFT_OUT = ("id2label", "label2id", "dtype", "architectures")
DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth")
# The limit of a number, by its name; the first pattern that matches decides.
NUMBERS: dict[str, int | None] = {
    r"layer_offset|kv_shared_layers": 0,
    r"upsample_groups": 64,
    r"rotary_dim$|index_topk$": 8,
    r"(^|_)n_?groups?$": 2,
    r"xpath|kernel|stride|dilation|channels?$|rate$|ratio|factor|_bins$|_offset$|dropout|groups?_norm": None,
    r"vocab|codebook_size|num_embeddings|num_hash_buckets": VOCABULARY,
    r"experts_per_tok|moe_k$|moe_top_?k|router_topk|^top_k$|num_selected_experts|topk_experts": 2,
    r"experts?$": 4,
    r"^topk_group$|dense_layers|first_k|num_dense": 1,
    r"interval|every_n|layer_period|layer_group_size|sparse_step|sliding_window_pattern": 2,
    r"key_value_heads|num_key_heads": 2,
    r"heads?$": 4,
    r"(head_(dim|size)|d_kv|dim_head|rope_dim|d_head)$": 16,
    r"_rank$|state_(size|dim)|d_state|chunk_size|block_size": 16,
    r"(^|_)(n_)?(layers?|depth|blocks|cycles)$": 2,
    r"intermediate|ffn|d_?ff$|dim_ff|feed_?forward|mlp_(dim|size|hidden)": 96,
    r"image_size|input_size|img_size|spec_size": 32,
    r"^(vision_)?patch_size$": 8,
    r"position|n_ctx|seq_len|max_length|num_queries|num_latents": 128,
    r"window": 16,
    r"hidden|d_model|n_embd|embed|(^|_)(width|dim|size)$": 64,
}
WIDTH = re.compile(r"hidden|intermediate|ffn|dim|d_model|embed|width|channels?$")
LAYER_INDICES = re.compile(r"layers$|indic|index|layer_ids?$|deepstack|feature_layer")
# Optional parts that bring norms with them.
FEATURE = re.compile(
    r"qk_?(layer_?)?norm|use_qk|(layer|rms)_?norm|(post|pre|out|sandwich|swin|task)_norm|norm_(bias|after|before)"
    r"|normalize_(before|modulator)|^add_adapter$"
)
NOT_FEATURE = re.compile(r"residual|remove|init_|share|elementwise|batch_norm")
FEATURE_WORDS = {"group": "layer", "layer_norm": "rms_norm", "no_norm": "layer_norm"}
FEATURE_WORDS |= {"batchnorm": "layernorm", "qwen3": "olmo"}
Layers = tuple[int, int] | None  # depth by default, depth to build


class Shrinker:
    """Makes one tiny config; remembers which optional features it switched on."""

    def __init__(self, features: bool, hints: dict):
        self.features, self.hints = features, hints
        self.switched: set[str] = set()
        self.token_ids: dict[str, int] = {}

    def make(
        self, cls: type[PretrainedConfig], given: PretrainedConfig | None = None
    ) -> PretrainedConfig:
        """A tiny config of cls, with the values of `given` where those are not cls's
        own defaults.
        """
        fresh = vars(cls())
        values = vars(given) if given else fresh
        layers = layers_of(given or cls())
        fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
        arguments: dict[str, Any] = {}
        for name, value in values.items():
            if name[0] == "_" or name in LEFT_OUT or name not in fields:
                continue
            if value is None:
                if "bool" in str(fields[name].type) and self._switch(name, False):
                    arguments[name] = True
            elif _is_of_layers(value, layers) or not _is_derived(
                fields[name], value, fresh
            ):
                arguments[name] = self.value(name, value, layers, values)
        owner = f"{cls.__name__}."
        hints = {
            name.removeprefix(owner): value
            for name, value in self.hints.items()
            if name.startswith(owner)
        }
        config = cls(**arguments | {n: hints[n] for n in hints.keys() & fields.keys()})
        for name, value in values.items():
            # a part of which its whole says more than its class knows
            if name[0] != "_" and name not in fields.keys() | fresh.keys():
                setattr(config, name, self.value(name, value, layers, values))
        for name, value in hints.items():
            setattr(config, name, value)
        return config

    def _part(self, config: PretrainedConfig) -> PretrainedConfig:
        if config.model_type == "timm_backbone" and not is_timm_available():
            # what Transformers itself offers in its place
            sizes = {"embedding_size": 16, "hidden_sizes": [16, 32, 48, 64]}
            sizes |= {"depths": [1, 1, 1, 1], "out_indices": [1, 2, 3, 4]}
            return CONFIG_MAPPING["resnet"](**sizes)
        return self.make(type(config), config)

    def value(self, name: str, value, layers: Layers, values: dict):
        """The value of an attribute in the tiny config, `values` being all by default."""
        if isinstance(value, PretrainedConfig):
            return self._part(value)
        if isinstance(value, bool):
            return self._switch(name, value)
        if TOKEN_ID.search(name) and isinstance(value, int):
            return self._token(name)
        if TOKEN_ID.search(name) and isinstance(value, (list, tuple)):
            return [self._token(f"{name}{i}") for i in range(len(value))]
        if isinstance(value, str):
            return self._word(name, value)
        if isinstance(value, (list, tuple)) and value:
            return shrunk_list(name, value, layers)
        if not isinstance(value, int):
            return value
        same_heads = value == values.get("num_attention_heads")
        if same_heads and re.search("key_value_heads|kv_heads", name):
            name = "num_attention_heads"
        if name == "num_hidden_layers" and layers is None:
            return value
        return shrunk_number(name, value, layers)

    def _switch(self, name: str, value: bool) -> bool:
        is_feature = FEATURE.search(name) and not NOT_FEATURE.search(name)
        if self.features and is_feature and not value:
            self.switched.add(name)
            return True
        return value

    def _word(self, name: str, value: str) -> str:
        if not self.features or "norm" not in name or value not in FEATURE_WORDS:
            return value
        self.switched.add(name)
        return FEATURE_WORDS[value]

    def _token(self, name: str) -> int:
        if name.startswith("eos_token_id"):
            return SPECIAL["eos_token_id"]
        if name in SPECIAL:
            return SPECIAL[name]
        free = VOCABULARY - 1 - len(self.token_ids)
        return self.token_ids.setdefault(name, free)


def tiny_config(
    cls: type[PretrainedConfig], features: bool, model_type: str
) -> tuple[PretrainedConfig, list[str]]:
    """(a tiny config, the optional features that are switched on in it)."""
    shrinker = Shrinker(features, HINTS.get(model_type, {}))
    config = shrinker.make(cls)
    return config, sorted(shrinker.switched)


def _is_derived(field: dataclasses.Field, value, fresh: dict) -> bool:
    """Whether the constructor works an attribute out of others."""
    if isinstance(value, PretrainedConfig):
        return False
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    of_another_kind = isinstance(default, str) and not isinstance(value, str)
    worked_out = default is None or of_another_kind
    return worked_out and repr(fresh.get(field.name)) == repr(value)


def _is_of_layers(value, layers: Layers) -> bool:
    """Whether an attribute is a list with an entry for each layer."""
    is_list = isinstance(value, (list, tuple))
    return is_list and layers is not None and len(value) == layers[0]


def layers_of(config: PretrainedConfig) -> Layers:
    """Enough layers for every kind that a config lists per layer; None where it has no
    depth, or calls the number of its stages so.
    """
    values = vars(config)
    depths = [values[name] for name in DEPTHS if isinstance(values.get(name), int)]
    stages = values.get("depths")
    staged = isinstance(stages, (list, tuple)) and depths[:1] == [len(stages)]
    if not depths or staged:
        return None
    kinds = [2]
    for value in values.values():
        per_layer = isinstance(value, (list, tuple)) and len(value) == depths[0]
        if per_layer and all(isinstance(entry, str) for entry in value):
            kinds.append(len(set(value)))
    pattern = getattr(config, "layers_block_type", ())
    if isinstance(pattern, (list, tuple)) and len(pattern) == depths[0]:
        kinds.append(_layers_to_reach(pattern))
    return depths[0], min(depths[0], max(kinds))


def _layers_to_reach(pattern: list[str] | tuple[str, ...]) -> int:
    """How many layers it takes to have each kind of the pattern; a second of each if
    that is near.
    """
    first = {kind: pattern.index(kind) for kind in set(pattern)}
    places = [*first.values()]
    for kind, place in first.items():
        if kind in pattern[place + 1 :]:  # layers of one kind may share their weights
            places.append(pattern.index(kind, place + 1))
    return 1 + (max(places) if max(places) < 12 else max(first.values()))


def shrunk_list(name: str, value, layers: Layers):
    """The list of an attribute in the tiny config."""
    kind = type(value)
    integers = all(isinstance(v, int) and not isinstance(v, bool) for v in value)
    depth, kept = layers or (None, None)
    per_layer = _is_of_layers(value, layers)
    indices = integers and LAYER_INDICES.search(name)
    if indices and not (per_layer and max(value) < depth - 1):
        return _layer_indices(name, value, layers)
    if per_layer and depth > 4:
        value = _of_each_kind(value, kept)
    if not integers:
        return value
    if re.search(r"depths|num_block|blocks|repeats|layers$", name):
        return kind(min(v, 2) for v in value)
    if name.endswith("in_channels") and len(set(value)) == 1:
        return kind(min(v, 64) for v in value)
    if WIDTH.search(name) and max(value) >= 32:
        return kind(v // 8 if v % 8 == 0 and v >= 16 else v for v in value)
    return value


def _layer_indices(name: str, value, layers: Layers):
    kind = type(value)
    if layers is None:
        if "layer" in name:  # of a part: it has two layers
            return kind(max(v, -2) if v < 0 else int(v == max(value)) for v in value)
        return value
    depth, kept = layers
    mapped = [i * kept // depth if i >= 0 else max(i, -kept) for i in value]
    return kind(sorted(set(mapped)) if len(value) > kept else mapped)


def _of_each_kind(value: list | tuple, count: int) -> list | tuple:
    """So many entries, the first of each kind among them."""
    kinds = list(dict.fromkeys(map(repr, value)))
    chosen = [next(v for v in value if repr(v) == kind) for kind in kinds][:count]
    return type(value)((chosen * count)[:count])


def shrunk_number(name: str, value: int, layers: Layers) -> int:
    """The number of an attribute in the tiny config."""
    if value <= 0:
        return value
    found = (limit for pattern, limit in NUMBERS.items() if re.search(pattern, name))
    limit = next(found, None)
    if layers is not None:
        depth, kept = layers
        if limit == 2 and value == depth:
            return kept
        if limit is None and LAYER_INDICES.search(name) and "size" not in name:
            return min(value, kept - 1)
    return value if limit is None else min(value, limit)

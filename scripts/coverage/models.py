"""Tiny random models of any type in Transformers, made from the type's config class by the names of its attributes.

There is no table of models: widths, depths, head counts and vocabularies are recognised by attribute name and shrunk
in one of several styles, and the first style whose model can be built and run is taken.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig
from transformers.configuration_utils import ALLOWED_LAYER_TYPES, ALLOWED_MLP_LAYER_TYPES
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import is_timm_available

MAX_PARAMETERS = 100_000_000
VOCABULARY = 128

# What to do with a scalar, by its name; the first pattern that matches decides. Numbers are upper limits.
SCALARS: list[tuple[re.Pattern, Any]] = [
    (re.compile(pattern), action)
    for pattern, action in (
        (r"layer_offset|kv_shared_layers", 0),
        (r"upsample_groups", 64),
        (r"rotary_dim$", 8),
        (r"(^|_)n_?groups$", 2),
        (r"xpath|kernel|stride|dilation|channels?$|rate$|ratio|factor|_bins$|_offset$|dropout|groups?_norm", "keep"),
        (r"vocab|codebook_size|num_embeddings|num_hash_buckets", VOCABULARY),
        (r"experts_per_tok|moe_k$|moe_top_?k|router_topk|^top_k$|num_selected_experts|topk_experts", 2),
        (r"experts?$|num_local_experts|n_routed_experts|moe_num_experts", 4),
        (r"^n_group$", 2),
        (r"^topk_group$", 1),
        (r"dense_replace|dense_layers|first_k|num_dense", 1),
        (r"interval|every_n|layer_period|layer_group_size|sparse_step|sliding_window_pattern|layer_freq", 2),
        (r"key_value_heads|kv_heads|num_key_heads|query_groups", 2),
        (r"heads?$|num_value_heads", 4),
        (r"(head_(dim|size)|d_kv|dim_head|rope_dim|d_head)$|_head_dim", 16),
        (r"lora_rank|_rank$", 16),
        (r"state_(size|dim)|d_state", 16),
        (r"chunk_size|block_size", 16),
        (r"(^|_)(layers?|n_layers?|depth|blocks|cycles)$|num_.*_layers$", 2),
        (r"intermediate|ffn|d_?ff$|dim_ff|feed_?forward|n_inner|mlp_(dim|size)|mlp_hidden", 96),
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
TOKEN_ID = re.compile(r"(tok(en)?_(id|index)s?|_token_id_\w+)$")
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
LAYER_INDICES = re.compile(r"layers$|idxs|indic|index|layer_ids|hook_ids|deepstack|layer_id$|feature_layer")
# Optional parts that bring norms with them.
FEATURE = re.compile(
    r"qk_?(layer_?)?norm|use_qk|(layer|rms)_?norm|(post|pre|out|sandwich|swin|task)_norm|norm_(bias|after|before)"
    r"|normalize_(before|modulator)|^add_adapter$|attention_gate"
)
NOT_FEATURE = re.compile(r"residual|remove|init_|share|reuse|elementwise|batch_norm|force")
FEATURE_WORDS = {"group": "layer", "no_norm": "layer_norm", "batchnorm": "layernorm", "qwen3": "olmo"}
OTHER_WAY = re.compile(r"norm_before_gate$")  # neither way is without, but each is another formula

# How numbers are shrunk: to fixed sizes; those and what is None filled in too; those but for the depth; widths divided
# by a common number; only the depth; not at all.
STYLES = ("fixed", "filled", "deep", "divide8", "divide4", "divide16", "shallow", "default")
FIXED = STYLES[:3]


def config_class(model_type: str) -> type[PretrainedConfig]:
    return CONFIG_MAPPING[model_type]


def model_class(name: str | tuple, model_type: str) -> type[torch.nn.Module]:
    name = name if isinstance(name, str) else name[0]
    if hasattr(transformers, name):
        return getattr(transformers, name)
    modeling = config_class(model_type).__module__.replace(".configuration_", ".modeling_")
    return getattr(importlib.import_module(modeling), name)  # some names of the mapping are not exported


class Same(str):
    """The name of the attribute whose value another must have."""


class Shrinker:
    """Makes one tiny config; remembers which optional features it switched on."""

    def __init__(self, style: str, features: bool, hints: dict | None = None):
        self.style, self.features = style, features
        self.switched: set[str] = set()
        self.token_ids: dict[str, int] = {}
        self.repairs: dict[str, Any] = dict(hints or {})

    def make(self, cls: type[PretrainedConfig], given: PretrainedConfig | None = None) -> PretrainedConfig:
        """A tiny config of cls, with the values of `given` where those are not cls's own defaults."""
        try:
            fresh = cls()
        except Exception:  # a config that refuses its own defaults still has the defaults of its fields
            fresh = None
        given = given or fresh
        values = {} if given is None else vars(given)
        own = {} if fresh is None else vars(fresh)
        arguments: dict[str, Any] = {}
        defaults = {f.name: _default(f) for f in dataclasses.fields(cls) if f.init and not f.name.startswith("_")}
        stages = values.get("depths")  # a config of stages may call their number its depth
        staged = isinstance(stages, (list, tuple)) and values.get("num_hidden_layers") == len(stages)
        layers = None if staged else self._layers(values, getattr(given, "layers_block_type", None))
        for name, default in defaults.items():
            value = values.get(name, default)
            if value is dataclasses.MISSING or name in ("id2label", "label2id", "dtype", "architectures"):
                continue
            if staged and name == "num_hidden_layers":
                continue
            if value is None and "dropout" in name:
                arguments[name] = 0.0
                continue
            if isinstance(value, PretrainedConfig) and value.model_type == "timm_backbone" and not is_timm_available():
                arguments[name] = self._backbone()
                continue
            if isinstance(value, PretrainedConfig):
                arguments[name] = self.make(type(value), value)
                continue
            optional = "bool" in str(cls.__dataclass_fields__[name].type) and self._is_feature(name)
            if value is None and (optional or (self.features and name == "rms_norm_eps")):
                self.switched.add(name)
                arguments[name] = True if optional else 1e-6  # an eps makes another kind of norm
                continue
            if value is None and self.style == "filled":
                arguments.update(self._fill(cls, name, layers))
                continue
            heads = values.get("num_heads")
            if name == "embed_dim" and isinstance(heads, (list, tuple)) and self.style in FIXED:
                arguments[name] = 8 * heads[0]  # of the first of several stages
                continue
            derived = default is None or (isinstance(default, str) and not isinstance(value, str))
            derived = derived and value is not None and _same(own.get(name), value)
            shrunk = self.value(name, value, layers)
            if re.search("key_value_heads|kv_heads", name) and value == values.get("num_attention_heads"):
                shrunk = self.value("num_attention_heads", value, layers)
            if derived and not (isinstance(value, (list, tuple)) and shrunk != value and layers):
                continue
            if shrunk is not None and not _same(shrunk, default):
                arguments[name] = shrunk
        for name in defaults.keys() & self.repairs.keys():
            value = self.repairs[name]
            arguments[name] = arguments.get(value, defaults.get(value)) if isinstance(value, Same) else value
        config = cls(**arguments)
        for name, value in self.repairs.items():
            if name.startswith(f"{cls.__name__}."):
                value = getattr(config, value) if isinstance(value, Same) else value
                setattr(config, name.partition(".")[2], value)
        if self.style != "default" and "mrope_section" in _source(cls):
            _divide_rotation(config)
        for name, value in values.items():  # attributes that a parent's config added
            if name not in defaults and not name.startswith("_") and fresh is not None and name not in own:
                setattr(config, name, self.value(name, value, layers))
        outputs = values.get("_out_indices")
        if outputs and not _same(outputs, own.get("_out_indices")) and hasattr(config, "stage_names"):
            last = len(config.stage_names) - 1
            config.out_indices = sorted({min(i if i >= 0 else last + 1 + i, last) for i in outputs})
        return config

    def repair(self, error: str) -> bool:
        """Learn from an error what some attribute must be; whether there was anything new to learn."""
        found: dict[str, Any] = {}
        if match := re.search(r"`?\b(\w+)\s*=\s*(True|False)`?", error):
            found[match[1]] = match[2] == "True"
        if match := re.search(r"\b(\w+) must be (?:set to )?(\d+|True|False)\b", error):
            found[match[1]] = {"True": True, "False": False}.get(match[2]) if match[2].isalpha() else int(match[2])
        if match := re.search(r"'(\w+Config)' object has no attribute '(\w+)'", error):
            action = next((action for pattern, action in SCALARS if pattern.search(match[2])), None)
            action = 10000.0 if match[2] == "rope_theta" else action
            action = Same("num_attention_heads") if match[2] == "num_key_value_heads" else action
            found[f"{match[1]}.{match[2]}"] = None if action == "keep" else action
        if match := re.search(rf"KeyError: '({'|'.join(ALLOWED_LAYER_TYPES)})'", error):
            found["rope_parameters"] = {match[1]: {"rope_type": "default", "rope_theta": 10000.0}}
        if match := re.search(r"missing required fields: \[(.*?)\]", error):
            found |= {name: 4 for name in re.findall(r"\w+", match[1])}
        if match := re.search(r"\b(\w+) must match (\w+)", error):
            found[match[1]] = Same(match[2])
        if match := re.search(r"`(\w+)` config needs to be specified", error):
            found[match[1]] = 4
        if match := re.search(r"`(\w+)` must be a multiple of [\w ]+\((\d+)\)", error):
            found[match[1]] = int(match[2])
        if "selected index k out of range" in error:
            found["num_queries"] = 8
        new = {k: v for k, v in found.items() if k not in self.repairs}
        self.repairs |= new
        return bool(new)

    @staticmethod
    def _backbone() -> PretrainedConfig:
        """What Transformers itself offers in the place of a backbone of timm, which is not installed."""
        return CONFIG_MAPPING["resnet"](
            embedding_size=16, hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1], out_indices=[1, 2, 3, 4]
        )

    def _layers(self, values: dict, pattern: list[str] | None) -> tuple[int, int] | None:
        """(depth by default, depth to build): enough layers for every kind that the config lists per layer."""
        depth = next(
            (
                values[n]
                for n in ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth")
                if isinstance(values.get(n), int)
            ),
            None,
        )
        if depth is None or self.style in ("default", "deep"):
            return None
        kinds = [
            len(set(map(str, v))) * (2 if n == "layers_block_type" else 1)
            for n, v in values.items()
            if isinstance(v, (list, tuple)) and len(v) == depth and all(isinstance(e, str) for e in v)
        ]
        if isinstance(pattern, (list, tuple)) and len(pattern) == depth:  # computed, so the depth must reach every kind
            places = [[i for i, kind in enumerate(pattern) if kind == each] for each in set(pattern)]
            second = max(indices[:2][-1] for indices in places)  # layers of one kind may share their weights
            kinds += [1 + (second if second < 12 else max(indices[0] for indices in places))]
        return depth, min(depth, max([2, *kinds]))

    def _fill(self, cls, name: str, layers) -> dict[str, Any]:
        """A value for an attribute that is None by default, where its annotation and name suggest one."""
        annotation = str(cls.__dataclass_fields__[name].type)
        if "float" in annotation and "clip" in name:
            return {name: 8.0}
        if "dict" in annotation and "vocab" in name:
            return {name: {"<image>": self._token(name)}}
        if name in SPECIAL:
            return {name: SPECIAL[name]}
        if "int" in annotation.split("list")[0]:
            action = next((action for pattern, action in SCALARS if pattern.search(name)), "keep")
            return {name: action} if isinstance(action, int) and not TOKEN_ID.search(name) else {}
        if LAYER_INDICES.search(name) and "list" in annotation and layers:
            return {name: [layers[1] - 1]}
        if name.endswith("layer_types") and layers:
            source = _source(cls)
            allowed = ALLOWED_MLP_LAYER_TYPES if "mlp" in name else ALLOWED_LAYER_TYPES
            kinds = [kind for kind in allowed if f'"{kind}"' in source][: layers[1]]
            return {name: [*kinds, *kinds[-1:] * layers[1]][: layers[1]]} if kinds else {}
        return {}

    def _is_feature(self, name: str) -> bool:
        return self.features and bool(FEATURE.search(name)) and not NOT_FEATURE.search(name)

    def value(self, name: str, value: Any, layers: tuple[int, int] | None) -> Any:
        if isinstance(value, bool):
            if self.features and OTHER_WAY.search(name):
                self.switched.add(name)
                return not value
            if not value and self._is_feature(name):
                self.switched.add(name)
                return True
            return value
        if TOKEN_ID.search(name) and isinstance(value, (int, list, tuple)):
            several = isinstance(value, (list, tuple))
            return [self._token(f"{name}{i}") for i in range(len(value))] if several else self._token(name)
        if self.features and name == "norm_type" and value == "layer_norm":
            self.switched.add(name)
            return "rms_norm"
        if isinstance(value, str) and self.features and "norm" in name and value in FEATURE_WORDS:
            self.switched.add(name)
            return FEATURE_WORDS[value]
        if isinstance(value, (list, tuple)) and value:
            return self._list(name, value, layers)
        return self._scalar(name, value, layers) if isinstance(value, int) else value

    def _token(self, name: str) -> int:
        if name.startswith("eos_token_id"):
            return SPECIAL["eos_token_id"]
        free = VOCABULARY - 1 - len(self.token_ids)
        return SPECIAL.get(name) if name in SPECIAL else self.token_ids.setdefault(name, free)

    def _list(self, name: str, value, layers: tuple[int, int] | None):
        if self.style == "default":
            return value
        depth, kept = layers or (None, None)
        if layers and all(isinstance(v, list) and len(v) == 2 and isinstance(v[1], int) for v in value):
            return type(value)([v[0], max(1, v[1] * kept // depth)] for v in value)
        integers = all(isinstance(v, int) and not isinstance(v, bool) for v in value)
        one_a_layer = depth is not None and len(value) == depth and max(value) < depth - 1 if integers else False
        if integers and LAYER_INDICES.search(name) and not one_a_layer:
            if depth is None and self.style in FIXED and "layer" in name:  # of a part: it has two layers
                return type(value)(max(v, -2) if v < 0 else int(v == max(value)) for v in value)
            if depth is None:
                return value
            mapped = [i * kept // depth if i >= 0 else max(i, -kept) for i in value]
            return type(value)(sorted(set(mapped)) if len(value) > kept else mapped)
        if depth is not None and len(value) == depth and depth > 4:
            kinds = list(dict.fromkeys(map(repr, value)))
            chosen = [next(v for v in value if repr(v) == kind) for kind in kinds][:kept]
            value = type(value)((chosen * kept)[:kept])
        if not integers:
            return value
        if re.search(r"depths|num_block|blocks|repeats|layers$", name):
            return type(value)(min(v, 2) for v in value)
        if name.endswith("in_channels") and len(set(value)) == 1 and self.style in FIXED:
            return type(value)(min(v, 64) for v in value)
        if WIDTH.search(name) and max(value) >= 32:
            divisor = 8 if self.style in FIXED else int(self.style.removeprefix("divide").replace("shallow", "1"))
            return type(value)(v // divisor if v % divisor == 0 and v >= 16 else v for v in value)
        return value

    def _scalar(self, name: str, value: int, layers: tuple[int, int] | None) -> int:
        if self.style == "default" or value <= 0:
            return value
        action = next((action for pattern, action in SCALARS if pattern.search(name)), "keep")
        if action == 2 and layers and value == layers[0]:
            return layers[1]
        if LAYER_INDICES.search(name) and layers and "size" not in name and action == "keep":
            return min(value, layers[1] - 1)
        if self.style.startswith("divide"):
            divisor = int(self.style.removeprefix("divide"))
            if action in (64, 96, 16) and WIDTH.search(name):
                return value // divisor if value % divisor == 0 and value >= 4 * divisor else value
            if action in (32, 8, 4) and "expert" not in name or action == 2 and "heads" in name:
                return value
        elif self.style == "shallow" and (action in (4, 8, 16, 32, 64, 96) or "heads" in name) and "expert" not in name:
            return value
        return value if action == "keep" else min(value, action)


def _divide_rotation(config: PretrainedConfig) -> None:
    """Give each of the three axes of a rotary embedding its part of half a head."""
    rope, heads = getattr(config, "rope_parameters", None), getattr(config, "num_attention_heads", None)
    size = getattr(config, "head_dim", None) or (heads and config.hidden_size // heads)
    if not isinstance(rope, dict) or not isinstance(size, int) or any(isinstance(v, dict) for v in rope.values()):
        return
    half = int(size * (rope.get("partial_rotary_factor") or 1.0)) // 2
    rope["mrope_section"] = [half * 3 // 8, half * 3 // 8, half - 2 * (half * 3 // 8)]


@functools.cache
def _source(cls: type[PretrainedConfig]) -> str:
    """The source of the modeling file that belongs to a config class."""
    file = Path(inspect.getfile(cls))
    file = file.with_name(file.name.replace("configuration_", "modeling_"))
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def _default(field: dataclasses.Field):
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _same(a, b) -> bool:
    return type(a) is type(b) and repr(a) == repr(b)


def build(model: type[torch.nn.Module], config: PretrainedConfig, small: bool, seed: int = 0) -> torch.nn.Module:
    """A random float32 model in eval mode, its norm weights spread as training spreads them.

    Args:
        small: the config is known to be; else the parameters are counted first, on the meta device.

    Raises:
        MemoryError: it has more than `MAX_PARAMETERS` parameters.
    """
    if not small:
        with torch.device("meta"):
            size = sum(p.numel() for p in model(config).parameters())
        if size > MAX_PARAMETERS:
            raise MemoryError(f"{size / 1e6:.0f} million parameters")
    torch.manual_seed(seed)
    built = model(config).float().eval()
    if hasattr(built, "set_experts_implementation"):
        built.set_experts_implementation("eager")  # grouped products ask for sizes that a tiny model may not have
    with torch.no_grad():
        for parameter in built.parameters():
            # Constant ones are norm weights, biases and gates: training moves them all.
            if not parameter.is_floating_point() or parameter.numel() < 2:
                continue
            if bool((parameter == parameter.flatten()[0]).all()):
                parameter.add_(0.2 * torch.randn_like(parameter))
    return built

"""Tiny random models of any type in Transformers, made from the type's config class by
the names of its attributes.

There is no table of models: widths, depths, head counts and vocabularies are recognised
by attribute name and shrunk in one of several styles, and the first style whose model
can be built and run is taken.
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
from transformers.configuration_utils import (
    ALLOWED_LAYER_TYPES,
    ALLOWED_MLP_LAYER_TYPES,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import is_timm_available

from .numbers import (
    FIXED,
    LAYER_INDICES,
    VOCABULARY,
    action_of,
    layers_to_reach,
    shrunk_list,
    shrunk_number,
)

MAX_PARAMETERS = 100_000_000
TOKEN_ID = re.compile(r"(tok(en)?_(id|index)s?|_token_id_\w+)$")
SPECIAL = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
# Optional parts that bring norms with them.
FEATURE = re.compile(
    r"qk_?(layer_?)?norm|use_qk|(layer|rms)_?norm|(post|pre|out|sandwich|swin|task)_norm|norm_(bias|after|before)"
    r"|normalize_(before|modulator)|^add_adapter$|attention_gate"
)
NOT_FEATURE = re.compile(
    r"residual|remove|init_|share|reuse|elementwise|batch_norm|force"
)
FEATURE_WORDS = {
    "group": "layer",
    "no_norm": "layer_norm",
    "batchnorm": "layernorm",
    "qwen3": "olmo",
}
# neither way is without, but each is another formula
OTHER_WAY = re.compile(r"norm_before_gate$")


def config_class(model_type: str) -> type[PretrainedConfig]:
    return CONFIG_MAPPING[model_type]


def model_class(name: str | tuple, model_type: str) -> type[torch.nn.Module]:
    name = name if isinstance(name, str) else name[0]
    if hasattr(transformers, name):
        return getattr(transformers, name)
    modeling = config_class(model_type).__module__.replace(
        ".configuration_", ".modeling_"
    )
    # some names of the mapping are not exported
    return getattr(importlib.import_module(modeling), name)


class Same(str):
    """The name of the attribute whose value another must have."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """The origin of a tiny config.

    Args:
        values: the attributes of the config that it is made after.
        fresh: those of a config of cls without arguments, or None if there can be none.
        defaults: of the constructor's arguments.
        staged: the number of layers is that of the stages.
        layers: (depth by default, depth to build), or None where the depth stays.
    """

    cls: type[PretrainedConfig]
    values: dict[str, Any]
    fresh: dict[str, Any] | None
    defaults: dict[str, Any]
    staged: bool
    layers: tuple[int, int] | None

    def leaves_out(self, name: str, value: Any) -> bool:
        """Whether an argument gets no value here."""
        if value is dataclasses.MISSING or name in (
            "id2label",
            "label2id",
            "dtype",
            "architectures",
        ):
            return True
        return self.staged and name == "num_hidden_layers"

    def is_derived(self, name: str, value: Any, default: Any) -> bool:
        """Whether the constructor works an attribute out of others."""
        worked_out = default is None or (
            isinstance(default, str) and not isinstance(value, str)
        )
        return (
            worked_out
            and value is not None
            and _same((self.fresh or {}).get(name), value)
        )

    def added_by_a_parent(self) -> list[tuple[str, Any]]:
        """Attributes that the constructor does not know."""
        if self.fresh is None:
            return []
        known = self.defaults.keys() | self.fresh.keys()
        return [
            (name, value)
            for name, value in self.values.items()
            if name not in known and name[0] != "_"
        ]


class Shrinker:
    """Makes one tiny config; remembers which optional features it switched on."""

    def __init__(self, style: str, features: bool, hints: dict | None = None):
        self.style, self.features = style, features
        self.switched: set[str] = set()
        self.token_ids: dict[str, int] = {}
        self.repairs: dict[str, Any] = dict(hints or {})

    def make(
        self, cls: type[PretrainedConfig], given: PretrainedConfig | None = None
    ) -> PretrainedConfig:
        """A tiny config of cls, with the values of `given` where those are not cls's
        own defaults.
        """
        plan = self._plan(cls, given)
        arguments: dict[str, Any] = {}
        for name, default in plan.defaults.items():
            value = plan.values.get(name, default)
            if not plan.leaves_out(name, value):
                arguments |= self._argument(plan, name, value, default)
        for name in plan.defaults.keys() & self.repairs.keys():
            value = self.repairs[name]
            arguments[name] = (
                arguments.get(value, plan.defaults.get(value))
                if isinstance(value, Same)
                else value
            )
        config = cls(**arguments)
        self._finish(config, plan)
        return config

    def _plan(
        self, cls: type[PretrainedConfig], given: PretrainedConfig | None
    ) -> Plan:
        try:
            fresh = cls()
        except Exception:
            # a config that refuses its own defaults still has the defaults of its
            # fields
            fresh = None
        given = given or fresh
        values = {} if given is None else vars(given)
        defaults = {
            f.name: _default(f)
            for f in dataclasses.fields(cls)
            if f.init and not f.name.startswith("_")
        }
        # a config of stages may call their number its depth
        stages = values.get("depths")
        staged = isinstance(stages, (list, tuple)) and values.get(
            "num_hidden_layers"
        ) == len(stages)
        layers = (
            None
            if staged
            else self._layers(values, getattr(given, "layers_block_type", None))
        )
        return Plan(
            cls,
            values,
            None if fresh is None else vars(fresh),
            defaults,
            staged,
            layers,
        )

    def _argument(
        self, plan: Plan, name: str, value: Any, default: Any
    ) -> dict[str, Any]:
        """The argument for one attribute, or none if its default will do."""
        if isinstance(value, PretrainedConfig):
            return {name: self._sub_config(value)}
        if value is None and "dropout" in name:
            return {name: 0.0}
        optional = "bool" in str(
            plan.cls.__dataclass_fields__[name].type
        ) and self._is_feature(name)
        if value is None and (optional or (self.features and name == "rms_norm_eps")):
            self.switched.add(name)
            # an eps makes another kind of norm
            return {name: True if optional else 1e-6}
        if value is None and self.style == "filled":
            return self._fill(plan.cls, name, plan.layers)
        heads = plan.values.get("num_heads")
        if (
            name == "embed_dim"
            and isinstance(heads, (list, tuple))
            and self.style in FIXED
        ):
            return {name: 8 * heads[0]}  # of the first of several stages
        return self._shrunk(plan, name, value, default)

    def _sub_config(self, config: PretrainedConfig) -> PretrainedConfig:
        if config.model_type == "timm_backbone" and not is_timm_available():
            return self._backbone()
        return self.make(type(config), config)

    def _shrunk(
        self, plan: Plan, name: str, value: Any, default: Any
    ) -> dict[str, Any]:
        shrunk = self.value(name, value, plan.layers)
        if re.search("key_value_heads|kv_heads", name) and value == plan.values.get(
            "num_attention_heads"
        ):
            shrunk = self.value("num_attention_heads", value, plan.layers)
        if plan.is_derived(name, value, default):
            of_layers = (
                isinstance(value, (list, tuple)) and shrunk != value and plan.layers
            )
            if not of_layers:
                return {}
        return {} if shrunk is None or _same(shrunk, default) else {name: shrunk}

    def _finish(self, config: PretrainedConfig, plan: Plan) -> None:
        """Set the attributes that the constructor does not take."""
        for name, value in self.repairs.items():
            if name.startswith(f"{plan.cls.__name__}."):
                value = getattr(config, value) if isinstance(value, Same) else value
                setattr(config, name.partition(".")[2], value)
        if self.style != "default" and "mrope_section" in _source(plan.cls):
            _divide_rotation(config)
        for name, value in plan.added_by_a_parent():
            setattr(config, name, self.value(name, value, plan.layers))
        outputs = plan.values.get("_out_indices")
        if (
            outputs
            and not _same(outputs, (plan.fresh or {}).get("_out_indices"))
            and hasattr(config, "stage_names")
        ):
            last = len(config.stage_names) - 1
            config.out_indices = sorted(
                {min(i if i >= 0 else last + 1 + i, last) for i in outputs}
            )

    def repair(self, error: str) -> bool:
        """Learn from an error what some attribute must be; whether there was anything
        new to learn.
        """
        asked: dict[str, Any] = {}
        for pattern, learn in REPAIRS:
            if match := pattern.search(error):
                asked |= learn(match)
        new = {k: v for k, v in asked.items() if k not in self.repairs}
        self.repairs |= new
        return bool(new)

    @staticmethod
    def _backbone() -> PretrainedConfig:
        """What Transformers itself offers in the place of a backbone of timm, which is
        not installed.
        """
        return CONFIG_MAPPING["resnet"](
            embedding_size=16,
            hidden_sizes=[16, 32, 48, 64],
            depths=[1, 1, 1, 1],
            out_indices=[1, 2, 3, 4],
        )

    def _layers(
        self, values: dict, pattern: list[str] | None
    ) -> tuple[int, int] | None:
        """(depth by default, depth to build): enough layers for every kind that the
        config lists per layer.
        """
        depths = (
            values.get(n)
            for n in ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth")
        )
        depth = next((d for d in depths if isinstance(d, int)), None)
        if depth is None or self.style == "default":
            return None
        kinds = [
            len(set(map(str, v))) * (2 if n == "layers_block_type" else 1)
            for n, v in values.items()
            if isinstance(v, (list, tuple))
            and len(v) == depth
            and all(isinstance(e, str) for e in v)
        ]
        if isinstance(pattern, (list, tuple)) and len(pattern) == depth:
            kinds.append(layers_to_reach(pattern))
        return depth, min(depth, max([2, *kinds]))

    def _fill(self, cls, name: str, layers) -> dict[str, Any]:
        """A value for an attribute that is None by default, where its annotation and
        name suggest one.
        """
        annotation = str(cls.__dataclass_fields__[name].type)
        if "float" in annotation and "clip" in name:
            return {name: 8.0}
        if "dict" in annotation and "vocab" in name:
            return {name: {"<image>": self._token(name)}}
        if name in SPECIAL:
            return {name: SPECIAL[name]}
        if "int" in annotation.split("list")[0]:
            action = action_of(name)
            return (
                {name: action}
                if isinstance(action, int) and not TOKEN_ID.search(name)
                else {}
            )
        if not layers:
            return {}
        if LAYER_INDICES.search(name) and "list" in annotation:
            return {name: [layers[1] - 1]}
        return (
            _layer_types(cls, name, layers[1]) if name.endswith("layer_types") else {}
        )

    def _is_feature(self, name: str) -> bool:
        return (
            self.features
            and bool(FEATURE.search(name))
            and not NOT_FEATURE.search(name)
        )

    def value(self, name: str, value: Any, layers: tuple[int, int] | None) -> Any:
        """The value of an attribute in the tiny config."""
        if isinstance(value, bool):
            return self._switch(name, value)
        if TOKEN_ID.search(name) and isinstance(value, (int, list, tuple)):
            several = isinstance(value, (list, tuple))
            return (
                [self._token(f"{name}{i}") for i in range(len(value))]
                if several
                else self._token(name)
            )
        if isinstance(value, str):
            return self._word(name, value)
        if isinstance(value, (list, tuple)) and value:
            return shrunk_list(self.style, name, value, layers)
        return (
            shrunk_number(self.style, name, value, layers)
            if isinstance(value, int)
            else value
        )

    def _switch(self, name: str, value: bool) -> bool:
        other_way = self.features and OTHER_WAY.search(name)
        if other_way or (not value and self._is_feature(name)):
            self.switched.add(name)
            return not value
        return value

    def _word(self, name: str, value: str) -> str:
        if not self.features:
            return value
        word = "rms_norm" if (name, value) == ("norm_type", "layer_norm") else None
        if word is None and "norm" in name:
            word = FEATURE_WORDS.get(value)
        if word is None:
            return value
        self.switched.add(name)
        return word

    def _token(self, name: str) -> int:
        if name.startswith("eos_token_id"):
            return SPECIAL["eos_token_id"]
        free = VOCABULARY - 1 - len(self.token_ids)
        return (
            SPECIAL.get(name)
            if name in SPECIAL
            else self.token_ids.setdefault(name, free)
        )


def _layer_types(cls, name: str, count: int) -> dict[str, list[str]]:
    """A list of so many kinds of layers, of those that the source of the model knows."""
    source = _source(cls)
    allowed = ALLOWED_MLP_LAYER_TYPES if "mlp" in name else ALLOWED_LAYER_TYPES
    kinds = [kind for kind in allowed if f'"{kind}"' in source][:count]
    return {name: [*kinds, *kinds[-1:] * count][:count]} if kinds else {}


def _fixed_value(match: re.Match) -> dict[str, Any]:
    value = (
        {"True": True, "False": False}.get(match[2])
        if match[2].isalpha()
        else int(match[2])
    )
    return {match[1]: value}


def _missing_attribute(match: re.Match) -> dict[str, Any]:
    config, name = match.groups()
    value = {
        "rope_theta": 10000.0,
        "num_key_value_heads": Same("num_attention_heads"),
    }.get(name, action_of(name))
    return {f"{config}.{name}": None if value == "keep" else value}


# (what an error says, the values of attributes that follow)
REPAIRS = tuple(
    (re.compile(pattern), learn)
    for pattern, learn in (
        (
            r"`?\b(\w+)\s*=\s*(True|False)`?",
            lambda match: {match[1]: match[2] == "True"},
        ),
        (r"\b(\w+) must be (?:set to )?(\d+|True|False)\b", _fixed_value),
        (r"'(\w+Config)' object has no attribute '(\w+)'", _missing_attribute),
        (
            rf"KeyError: '({'|'.join(ALLOWED_LAYER_TYPES)})'",
            lambda match: {
                "rope_parameters": {
                    match[1]: {"rope_type": "default", "rope_theta": 10000.0}
                }
            },
        ),
        (
            r"missing required fields: \[(.*?)\]",
            lambda match: dict.fromkeys(re.findall(r"\w+", match[1]), 4),
        ),
        (r"\b(\w+) must match (\w+)", lambda match: {match[1]: Same(match[2])}),
        (r"`(\w+)` config needs to be specified", lambda match: {match[1]: 4}),
        (
            r"`(\w+)` must be a multiple of [\w ]+\((\d+)\)",
            lambda match: {match[1]: int(match[2])},
        ),
        ("selected index k out of range", lambda match: {"num_queries": 8}),
    )
)


def _divide_rotation(config: PretrainedConfig) -> None:
    """Give each of the three axes of a rotary embedding its part of half a head."""
    rope, heads = (
        getattr(config, "rope_parameters", None),
        getattr(config, "num_attention_heads", None),
    )
    size = getattr(config, "head_dim", None) or (heads and config.hidden_size // heads)
    if (
        not isinstance(rope, dict)
        or not isinstance(size, int)
        or any(isinstance(v, dict) for v in rope.values())
    ):
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


def build(
    model: type[torch.nn.Module], config: PretrainedConfig, small: bool, seed: int = 0
) -> torch.nn.Module:
    """A random float32 model in eval mode, its norm weights spread as training spreads
    them.

    Args:
        small: the config is known to be; else the parameters are counted first, on the
            meta device.

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
        # grouped products ask for sizes that a tiny model may not have
        built.set_experts_implementation("eager")
    with torch.no_grad():
        for parameter in built.parameters():
            # Constant ones are norm weights, biases and gates: training moves them all.
            if not parameter.is_floating_point() or parameter.numel() < 2:
                continue
            if bool((parameter == parameter.flatten()[0]).all()):
                parameter.add_(0.2 * torch.randn_like(parameter))
    return built

"""A small random model of a type, and the arguments that it runs on: the package's own,
or those that `scripts/data/inputs.json` has for its type.

A tensor is there a word and a shape (``"normal 2x4x8"``, ``"true 2x8"``, ``"ids 10
2x8"``: numbers below 10, ``"words 90 2x8"``: numbers from 3 to 90), or ``{"float":
[0.5]}`` with its values. Vision towers that Transformers takes from timm get a stand-in, so that the types around
them can be built.
"""

from __future__ import annotations

import copy
import importlib
import json
import pkgutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)
from transformers.utils import ModelOutput, is_timm_available

from hf_rmsnorm.verification.context import default_inputs, in_dtype_of

from .configs import tiny_config
from .runs import line

DATA = Path(__file__).resolve().parents[1] / "data/inputs.json"
GIVEN: dict[str, dict] = json.loads(DATA.read_text(encoding="utf-8"))
DTYPES = {"int": torch.int64, "bool": torch.bool}
MAPPINGS = {"causal": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "base": MODEL_MAPPING_NAMES}


def classes_of(model_type: str, mapping: str) -> tuple[type, type[PretrainedConfig]]:
    """The model class of a type, and the class of its config."""
    name = MAPPINGS[mapping][model_type]
    name = name if isinstance(name, str) else name[0]
    config = CONFIG_MAPPING[model_type]
    cls = getattr(transformers, name, None)
    if cls is None:  # some names of the mapping are not exported
        modeling = config.__module__.replace(".configuration_", ".modeling_")
        cls = getattr(importlib.import_module(modeling), name)
    own = getattr(cls, "config_class", None)
    if own is not None and not issubclass(config, own):
        config = own  # the decoder of a composite type has another config
    return cls, config


@dataclass
class Made:
    """A model, the arguments that it runs on or None, the error if it has none, and the
    optional features that are switched on.
    """

    model: torch.nn.Module
    arguments: dict | None
    error: str | None
    features: list[str]


def tiny_model(model_type: str, cls, config, features: bool) -> Made | None:
    """A model in bfloat16, or in float32 where it runs in that alone; None where there
    are no features to switch on.
    """
    tiny, switched = tiny_config(config, features, model_type)
    if features and not switched:
        return None
    model = build(cls, tiny)
    # as ``from_pretrained(dtype=torch.bfloat16)`` does
    kept = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    cast(model, torch.bfloat16, kept)
    errors = []
    for dtype in (torch.bfloat16, torch.float32):
        if dtype == torch.float32:
            model = model.float()
        try:
            arguments = inputs_of(model, model_type)
            if outputs(model, arguments):
                return Made(model, arguments, None, switched)
            errors.append("it returned no tensor")
        except Exception as error:  # of any kind, on inputs that do not suit a model
            errors.append(line(error))
    return Made(model.bfloat16(), None, errors[0], switched)


def build(cls: type[torch.nn.Module], config: PretrainedConfig) -> torch.nn.Module:
    """A random float32 model in eval mode, its norm weights spread as training spreads
    them.
    """
    torch.manual_seed(0)
    built = cls(config).float().eval()
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


def cast(model: torch.nn.Module, dtype: torch.dtype, kept: Collection[str]) -> None:
    """Cast all that a checkpoint holds, but for the modules of these names. Rotary
    frequencies and the like, which it does not hold, stay as they are made.
    """
    kept = set(kept)
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point() and kept.isdisjoint(name.split(".")):
            tensor.data = tensor.data.to(dtype)


def inputs_of(model: torch.nn.Module, model_type: str) -> dict:
    """Keyword arguments of a forward in the model's dtype, the same each time."""
    if model_type not in GIVEN:
        return in_dtype_of(model, default_inputs(model))
    given = GIVEN[model_type].items()
    return {name: value_of(value, model.dtype) for name, value in given}


def value_of(value, dtype: torch.dtype):
    """What stands in the JSON, with its tensors; those of floats in this dtype."""
    if isinstance(value, str) and " " in value:
        return _tensor(*value.split(), dtype=dtype)
    if isinstance(value, list):
        return [value_of(part, dtype) for part in value]
    if not isinstance(value, dict):
        return value
    if "new" in value:
        return pkgutil.resolve_name(value["new"])(*value["arguments"])
    if len(value) == 1 and (kind := next(iter(value))) in ("float", *DTYPES):
        return torch.tensor(value[kind], dtype=DTYPES.get(kind, dtype))
    return {
        int(key) if key.isdigit() else key: value_of(part, dtype)
        for key, part in value.items()
    }


def _tensor(kind: str, *words: str, dtype: torch.dtype) -> torch.Tensor:
    shape = [int(size) for size in words[-1].split("x")]
    generator = torch.Generator().manual_seed(sum(shape))
    match kind:
        case "normal":
            return torch.randn(shape, generator=generator).to(dtype)
        case "ones":
            return torch.ones(shape, dtype=dtype)
        case "true":
            return torch.ones(shape, dtype=torch.bool)
        case "ids":
            return torch.randint(int(words[0]), shape, generator=generator)
        case "words":
            return torch.randint(3, int(words[0]), shape, generator=generator)
        case "full":
            return torch.full(shape, int(words[0]))
    raise ValueError(f"{kind!r} is no kind of tensor")


def tensors(output) -> Iterator[torch.Tensor]:
    """Every tensor of a model's output, in order; caches are left out."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        for key, value in output.items():
            if "past_key_values" not in key and "cache" not in key:
                yield from tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from tensors(value)


def outputs(model: torch.nn.Module, arguments: dict) -> list[torch.Tensor]:
    """Copies of all that a forward gives, the same each time."""
    torch.manual_seed(0)
    with torch.no_grad():
        return [t.detach().clone() for t in tensors(model(**copy.deepcopy(arguments)))]


@dataclass
class StandInOutput(ModelOutput):
    last_hidden_state: Any = None
    logits: torch.Tensor | None = None
    hidden_states: tuple | None = None


class StandIn(transformers.PreTrainedModel):
    """In the place of a part that timm makes: patches of 8 x 8, projected, with no
    norm.
    """

    def __init__(self, config):
        super().__init__(config)
        made = getattr(config, "model_args", None) or {}
        width = getattr(config, "hidden_size", None) or made.get("embed_dim", 64)
        self.levels = len(made["out_indices"]) if made.get("features_only") else 0
        self.projection = torch.nn.Conv2d(3, width, 8, 8)
        self.head = torch.nn.Linear(width, getattr(config, "num_labels", 2) or 2)
        self.post_init()

    def forward(self, pixel_values, **kwargs):
        y = self.projection(pixel_values)
        levels = []
        for i in range(self.levels):
            levels.append(torch.nn.functional.interpolate(y, scale_factor=2.0**-i))
        logits = self.head(y.mean((2, 3)))
        return StandInOutput(last_hidden_state=levels or y, logits=logits)


def stand_in_for_timm() -> None:
    """Let the types that hold a model of timm be built without it; timm's own types are
    not built then.
    """
    if is_timm_available():
        return
    for model_type, name in MODEL_MAPPING_NAMES.items():
        if "TimmWrapperModel" in (name, *name):
            config = CONFIG_MAPPING[model_type]
            model = type("StandIn", (StandIn,), {"config_class": config})
            for name in ("AutoModel", "AutoModelForImageClassification"):
                auto = getattr(transformers, name)
                auto.register(config, model, exist_ok=True)

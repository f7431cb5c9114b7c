"""Tiny random transformers of diffusers, and what they are called with, from
`scripts/data/diffusers_models.json`.

The JSON has for each class the arguments of its constructor and of its forward. A
tensor there is a word and a shape (``"normal 2x4x8"``, ``"true 2x8"``, ``"ids 10
2x8"``: numbers below 10), or ``{"float": [0.5]}`` with its values.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import pkgutil
from pathlib import Path

import torch

DATA = Path(__file__).resolve().parents[1] / "data" / "diffusers_models.json"
DTYPES = {"int": torch.int64, "bool": torch.bool}


@functools.cache
def classes() -> dict[str, type]:
    """The transformers of the installed diffusers, by name."""
    from diffusers import ModelMixin
    from diffusers.models import transformers

    names = [
        f"{transformers.__name__}.{module.name}"
        for module in pkgutil.iter_modules(transformers.__path__)
    ]
    values = [
        value
        for name in names
        for value in vars(importlib.import_module(name)).values()
    ]
    models = {
        c
        for c in values
        if inspect.isclass(c) and issubclass(c, ModelMixin) and c.__module__ in names
    }
    return {cls.__name__: cls for cls in sorted(models, key=lambda cls: cls.__name__)}


def build(name: str, dtype: torch.dtype) -> tuple[torch.nn.Module, dict]:
    """(model, arguments of its forward), the same each time; in its dtype but for the
    parts that stay in float32.

    Raises:
        KeyError: the JSON has no such class.
    """
    entry = json.loads(DATA.read_text(encoding="utf-8"))[name]
    torch.manual_seed(0)
    model = classes()[name](**_tuples(entry["config"])).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # as if trained: zeros would hide gates and modulations
            noise = torch.randn_like(parameter)
            parameter.copy_(
                parameter + 0.1 * noise if parameter.dim() < 2 else 0.15 * noise
            )
    _cast(model, dtype)
    return model, {key: _value(value, dtype) for key, value in entry["inputs"].items()}


def _cast(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast as ``from_pretrained(torch_dtype=dtype)`` does."""
    kept = set(model._keep_in_fp32_modules or ())
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point() and kept.isdisjoint(name.split(".")):
            tensor.data = tensor.data.to(dtype)


def _tuples(value):
    """The JSON's lists as the tuples that constructors expect."""
    if isinstance(value, dict):
        return {key: _tuples(part) for key, part in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _value(value, dtype: torch.dtype):
    if isinstance(value, str) and " " in value:
        return _tensor(*value.split(), dtype=dtype)
    if isinstance(value, list):
        return [_value(part, dtype) for part in value]
    if not isinstance(value, dict):
        return value
    if "new" in value:
        return pkgutil.resolve_name(value["new"])(*value["arguments"])
    if len(value) == 1 and (kind := next(iter(value))) in ("float", *DTYPES):
        return torch.tensor(value[kind], dtype=DTYPES.get(kind, dtype))
    return {
        int(key) if key.isdigit() else key: _value(part, dtype)
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
        case "full":
            return torch.full(shape, int(words[0]))
    raise ValueError(
        f"{DATA.name}: {kind!r} is no kind of tensor: write normal, ones, true, ids or full"
    )

"""Inputs that a tiny model runs on: the package's own, or those that
`scripts/data/inputs.json` has for its type.

A tensor is there a word and a shape (``"normal 2x4x8"``, ``"true 2x8"``, ``"ids 10
2x8"``: numbers below 10, ``"words 90 2x8"``: numbers from 3 to 90), or ``{"float":
[0.5]}`` with its values.
"""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import torch

from hf_rmsnorm.verification.context import default_inputs, in_dtype_of

DATA = Path(__file__).resolve().parents[1] / "data/inputs.json"
GIVEN: dict[str, dict] = json.loads(DATA.read_text(encoding="utf-8"))
DTYPES = {"int": torch.int64, "bool": torch.bool}


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
    raise ValueError(
        f"{kind!r} is no kind of tensor: write normal, ones, true, ids, words or full"
    )


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

"""Names of tensors as a checkpoint has them, where it leaves out or adds the prefix of the model inside."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..checkpoint.shard import read_keys
from ..checkpoint.source import read_json
from ..plan import CentringPlan, ConversionRefused


def stored_names(folder: Path) -> set[str]:
    """Names of all safetensors tensors of a folder, from its index or headers; none where it has no such file."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return set(read_json(index).get("weight_map", ()))
    names: set[str] = set()
    for file in sorted(folder.glob("*.safetensors")):
        names.update(read_keys(file))
    return names


def named_as_stored(plan: CentringPlan, names: set[str], prefix: str) -> CentringPlan:
    """The plan with each key as the checkpoint has it: a head model may have been saved without its `prefix`.

    Args:
        names: every tensor of the checkpoint.
        prefix: ``base_model_prefix`` of the class.

    Raises:
        ConversionRefused: a tensor that the plan changes is there under neither name.
    """
    new = {c.key for c in plan.copy}

    def name(key: str, optional: bool = False) -> str:
        for candidate in (key, key.removeprefix(f"{prefix}."), f"{prefix}.{key}"):
            if candidate in names:
                return candidate
        if optional or key in new:
            return key
        raise ConversionRefused(
            f"the checkpoint has no tensor {key!r}, which this version of Transformers saves for such a model: load "
            "and save it once with save_pretrained, then convert the result"
        )

    return replace(
        plan,
        centre=tuple(replace(c, key=name(c.key)) for c in plan.centre),
        scale=tuple(replace(s, key=name(s.key), by=name(s.by)) for s in plan.scale),
        copy=tuple(replace(c, key=name(c.key), source=name(c.source)) for c in plan.copy),
        undetermined=tuple(name(key, optional=True) for key in plan.undetermined),
    )

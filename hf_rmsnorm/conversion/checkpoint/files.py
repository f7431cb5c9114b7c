"""The files of a result beside its shards: config.json, the index, and what is copied as it is."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from ...record import RECORD_KEY
from .layout import ShardLayout
from .source import INDEX, Checkpoint


def write_other_files(source: Checkpoint, layout: ShardLayout, config: str | None, folder: Path) -> None:
    """Put everything but the shards in place, and remove what a run that did not end left there.

    The copies are verbatim; config.json, last, is that text, or the source's own.
    """
    expected = {*layout.shards, *source.others, source.config_name, *([INDEX] if layout.index is not None else [])}
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            if os.path.relpath(path, folder) not in expected:
                path.unlink()
    for name in source.others:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source.folder / name, target)
    if layout.index is not None:
        (folder / INDEX).write_bytes(layout.index)
    if config is None:
        shutil.copyfile(source.folder / source.config_name, folder / source.config_name)
    else:
        (folder / source.config_name).write_text(config, encoding="utf-8")


def changed_config(config: dict, changes: dict) -> str:
    """Text of a config with the changes set, as `_merged` does."""
    return json.dumps(_merged(config, changes), indent=2) + "\n"


def _merged(config: dict, changes: dict) -> dict:
    """The config with the changes set, dictionaries in it merged but for the record of another conversion.

    Keys stay in their order, new ones come last.
    """
    result = dict(config)
    for key, value in changes.items():
        both = key != RECORD_KEY and isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = _merged(result[key], value) if both else value
    return result

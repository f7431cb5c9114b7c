"""The files of the result beside its shards: config.json, the index, and what is copied as it is."""

from __future__ import annotations

import json
import os
import shutil
from math import prod
from pathlib import Path

from ...record import RECORD_KEY
from .recipe import Job
from .source import INDEX, Source


def write_other_files(job: Job, folder: Path) -> None:
    """Put everything but the shards in place, and remove what a run that did not end left there.

    The copies are verbatim; the index gets the new tensors; config.json, last, gets the plan's keys.
    """
    source = job.source
    expected = {*(shard.name for shard in source.shards), *source.others, source.config_name}
    if source.index is not None:
        expected.add(INDEX)
    copy_others(source, folder, expected)
    if source.index is not None:
        _write_index(job, folder / INDEX)
    if job.plan.config:
        config = merged(source.config, job.plan.config)
        (folder / source.config_name).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    else:
        shutil.copyfile(source.folder / source.config_name, folder / source.config_name)


def copy_others(source: Source, folder: Path, expected: set[str]) -> None:
    """Copy what is neither weights nor config as it is, and remove what is not expected in the folder."""
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            if os.path.relpath(path, folder) not in expected:
                path.unlink()
    for name in source.others:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source.folder / name, target)


def merged(config: dict, changes: dict) -> dict:
    """The config with the changes set, dictionaries in it merged but for the record of another conversion.

    Keys stay in their order, new ones come last.
    """
    result = dict(config)
    for key, value in changes.items():
        both = key != RECORD_KEY and isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else value
    return result


def _write_index(job: Job, target: Path) -> None:
    source = job.source
    if source.index_name == INDEX and not job.added:
        shutil.copyfile(source.folder / INDEX, target)
        return
    shard_of = {shard.path.name: shard.name for shard in source.shards}
    names = {key: shard_of[name] for key, name in source.index["weight_map"].items()}
    names |= {key: source.tensors[old][0].name for key, old in job.added.items()}
    metadata = dict(source.index.get("metadata") or {})
    metadata["total_size"] = sum(tensor.nbytes for _, tensor in job.tensors())
    if "total_parameters" in metadata:
        metadata["total_parameters"] += sum(prod(source.tensors[old][1].shape) for old in job.added.values())
    index = {**source.index, "metadata": metadata, "weight_map": names}
    target.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

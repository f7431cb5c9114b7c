"""Write the tensors of a native target to shards while those of the source are read, row by row."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from math import prod
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from transformers import PretrainedConfig

from .arithmetic import as_bytes
from .native_tensors import Expression
from .shards import sha256_of
from .source import FLOATS, INDEX, ConversionError, Source
from .staging import Staging, clear_errors, durable_file, write_all


class Folder:
    """The tensors of a checkpoint folder as `Values`; its shards stay open until `stack` closes.

    Args:
        aliases: other names that a tensor may have in the folder.
    """

    def __init__(self, source: Source, stack: ExitStack, aliases: dict[str, str]):
        self.source, self.aliases = source, aliases
        self._reads = {shard.name: stack.enter_context(shard.reading()) for shard in source.shards}

    def stored(self, key: str):
        """The shard and the header entry of a tensor."""
        name = key if key in self.source.tensors else self.aliases.get(key, key)
        if name not in self.source.tensors:
            raise ConversionError(
                f"{self.source.folder}: no tensor {key}: the checkpoint is not whole, download it again"
            )
        shard, tensor = self.source.tensors[name]
        if tensor.dtype not in FLOATS:
            raise ConversionError(
                f"{shard.path}: {name} is {tensor.dtype}: it is quantised; convert the unquantised model, "
                "then quantise it"
            )
        return shard, tensor

    def shape(self, key):
        return self.stored(key)[1].shape

    def rows(self, key, first, last):
        shard, tensor = self.stored(key)
        dtype, size = FLOATS[tensor.dtype], prod(tensor.shape[1:])
        width = size * dtype.itemsize
        raw = self._reads[shard.name](tensor, first * width, last * width)
        return torch.frombuffer(raw, dtype=dtype).double().view(last - first, *tensor.shape[1:])


class Layout:
    """Which tensor lies in which shard: dtypes, shapes and names of files, known before a byte is written."""

    def __init__(self, tensors: dict[str, Expression], values: Folder, max_shard_size: int | str):
        self.tensors, self.values = tensors, values
        self.dtypes = {name: values.stored(made.like)[1].dtype for name, made in tensors.items()}
        self.shapes = {name: made.shape(values) for name, made in tensors.items()}
        self.sizes = {name: prod(self.shapes[name]) * FLOATS[self.dtypes[name]].itemsize for name in tensors}
        split = split_state_dict_into_shards_factory(
            self.sizes,
            get_storage_size=lambda size: size,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=max_shard_size,
        )
        self.shards: dict[str, list[str]] = split.filename_to_tensors

    def index(self) -> dict:
        """What ``model.safetensors.index.json`` holds."""
        names = {tensor: shard for shard, held in self.shards.items() for tensor in held}
        metadata = {
            "total_size": sum(self.sizes.values()),
            "total_parameters": sum(prod(shape) for shape in self.shapes.values()),
        }
        return {"metadata": metadata, "weight_map": dict(sorted(names.items()))}

    def header(self, shard: str, metadata: dict[str, str]) -> bytes:
        """Length and JSON, padded so that every tensor is aligned."""
        header: dict = {"__metadata__": metadata}
        at = 0
        for name in self.shards[shard]:
            offsets = [at, at + self.sizes[name]]
            header[name] = {"dtype": self.dtypes[name], "shape": list(self.shapes[name]), "data_offsets": offsets}
            at += self.sizes[name]
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text


def write_shards(
    layout: Layout, staging: Staging, metadata: dict[str, str], resumed: list[str]
) -> Iterator[tuple[int, int]]:
    """Write what the journal of `staging` does not have, and yield tensors and bytes done since the last time."""
    finished = staging.journal["shards"]
    for shard, names in layout.shards.items():
        target = staging.model / shard
        with clear_errors(target):
            # What a run that did not end says it wrote is read back: the disk may have lost it.
            if shard in finished and target.exists() and sha256_of(target) == finished[shard]["sha256"]:
                resumed.append(shard)
                yield len(names), sum(layout.sizes[name] for name in names)
                continue
            sha256 = yield from _write_shard(layout, shard, target, metadata)
            finished[shard] = {"sha256": sha256, "size": os.path.getsize(target)}
            staging.save()


def _write_shard(
    layout: Layout, shard: str, target: Path, metadata: dict[str, str]
) -> Generator[tuple[int, int], None, str]:
    sha = hashlib.sha256()
    with durable_file(target) as file:
        header = layout.header(shard, metadata)
        write_all(file, header)
        sha.update(header)
        for name in layout.shards[shard]:
            dtype = FLOATS[layout.dtypes[name]]
            for piece in layout.tensors[name].pieces(layout.values):
                data = as_bytes(piece.reshape(-1), dtype)
                write_all(file, data)
                sha.update(data)
                yield 0, len(data)
            yield 1, 0
        layout.values.source.check_unchanged()  # before the rename: a mixture never gets a shard's name
    return sha.hexdigest()


def write_other_files(layout: Layout, config: PretrainedConfig, folder: Path) -> None:
    """Put everything but the shards in place, and remove what a run that did not end left there."""
    source = layout.values.source
    sharded = len(layout.shards) > 1
    expected = {*layout.shards, *source.others, "config.json", *([INDEX] if sharded else [])}
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            if os.path.relpath(path, folder) not in expected:
                path.unlink()
    for name in source.others:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source.folder / name, target)
    if sharded:
        (folder / INDEX).write_text(json.dumps(layout.index(), indent=2) + "\n", encoding="utf-8")
    (folder / "config.json").write_text(config.to_json_string(), encoding="utf-8")

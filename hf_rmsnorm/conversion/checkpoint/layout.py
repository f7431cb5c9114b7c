"""The files of a result and the tensors in them: as in the source, or in shards of a
size at most.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

import torch
from huggingface_hub import split_state_dict_into_shards_factory

from ..tensors import Lazy, Stored
from .source import CODES, Checkpoint

MAX_SHARD_SIZE = "5GB"
COPIED = 1 << 22  # bytes of an unchanged tensor that are in memory at a time


@dataclass(frozen=True)
class HeaderEntry:
    """A tensor of a result, and its entry in the header of its file."""

    tensor: Lazy = field(repr=False)
    code: str  # its dtype, "BF16"
    shape: tuple[int, ...]
    nbytes: int

    def data(self, source: Checkpoint) -> Iterator[memoryview]:
        """Its bytes, in pieces."""
        if isinstance(self.tensor, Stored) and self.tensor.is_copy:
            for first in range(0, self.nbytes, COPIED):
                last = min(first + COPIED, self.nbytes)
                yield memoryview(source.data(self.tensor.like, first, last).numpy())
        else:
            yield memoryview(
                self.tensor.value(source).reshape(-1).view(torch.uint8).numpy()
            )


@dataclass(frozen=True)
class Shard:
    """A file of a result."""

    metadata: dict[str, str]  # ``__metadata__``
    entries: dict[str, HeaderEntry]  # larger elements first, so that all are aligned

    def header(self) -> bytes:
        """Length and JSON of the header."""
        header: dict = {"__metadata__": self.metadata} if self.metadata else {}
        at = 0
        for name, entry in self.entries.items():
            header[name] = {
                "dtype": entry.code,
                "shape": entry.shape,
                "data_offsets": [at, at + entry.nbytes],
            }
            at += entry.nbytes
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(entry.nbytes for entry in self.entries.values())


@dataclass(frozen=True)
class Layout:
    """The shards of a result by file name, and its index, where it has one."""

    shards: dict[str, Shard]
    index: dict | None = field(repr=False)


def as_source(
    tensors: dict[str, Lazy], source: Checkpoint, metadata: dict[str, str] | None = None
) -> Layout:
    """The shards of the source, with `metadata` added; a new tensor is in the shard of
    the one that it is like.
    """
    added = sorted(tensors.keys() - source.tensors.keys())
    ordered = [*(name for name in source.tensors if name in tensors), *added]
    names: dict[str, list[str]] = {file: [] for file in source.metadata}
    for name in ordered:
        names[source.tensors[tensors[name].like].file].append(name)
    shards = {}
    for file, kept in source.metadata.items():
        # Safetensors notes there which tensor a tied one is saved as: one that is saved
        # itself is not tied.
        kept = {key: text for key, text in kept.items() if key not in tensors}
        name = file.replace("pytorch_model", "model").replace(".bin", ".safetensors")
        shards[name] = _shard(names[file], tensors, source, kept | (metadata or {}))
    return Layout(
        shards, None if source.index is None else _index(shards, source.index)
    )


def split(
    tensors: dict[str, Lazy], source: Checkpoint, metadata: dict[str, str]
) -> Layout:
    """Shards of a size at most, as `save_pretrained` makes them."""
    sizes = {name: _entry(made, source).nbytes for name, made in tensors.items()}
    names = split_state_dict_into_shards_factory(
        sizes,
        get_storage_size=int,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=MAX_SHARD_SIZE,
    ).filename_to_tensors
    shards = {
        file: _shard(held, tensors, source, metadata) for file, held in names.items()
    }
    return Layout(
        shards,
        _index(shards, {"metadata": {"total_parameters": 0}})
        if len(shards) > 1
        else None,
    )


def _shard(
    names: list[str],
    tensors: dict[str, Lazy],
    source: Checkpoint,
    metadata: dict[str, str],
) -> Shard:
    entries = {name: _entry(tensors[name], source) for name in names}
    widths = {
        name: entry.nbytes // max(1, prod(entry.shape))
        for name, entry in entries.items()
    }
    return Shard(
        metadata,
        {name: entries[name] for name in sorted(names, key=lambda name: -widths[name])},
    )


def _entry(made: Lazy, source: Checkpoint) -> HeaderEntry:
    if isinstance(made, Stored) and made.is_copy:
        stored = source.tensors[made.like]
        return HeaderEntry(made, stored.code, stored.shape, stored.nbytes)
    dtype, shape = made.dtype(source), made.shape(source)
    return HeaderEntry(made, CODES[dtype], shape, prod(shape) * dtype.itemsize)


def _index(shards: dict[str, Shard], before: dict) -> dict:
    entries = [entry for shard in shards.values() for entry in shard.entries.values()]
    sizes = {
        **(before.get("metadata") or {}),
        "total_size": sum(entry.nbytes for entry in entries),
    }
    if "total_parameters" in sizes:
        sizes["total_parameters"] = sum(prod(entry.shape) for entry in entries)
    file_of = {name: file for file, shard in shards.items() for name in shard.entries}
    return {**before, "metadata": sizes, "weight_map": dict(sorted(file_of.items()))}

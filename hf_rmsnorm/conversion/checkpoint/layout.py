"""The files of a result and the tensors in them, in shards like those of the source."""

import json
from dataclasses import dataclass, field
from math import prod

import torch

from ..tensors import Lazy
from .source import CODES, Checkpoint


@dataclass(frozen=True)
class HeaderEntry:
    """A tensor of a result, and its entry in the header of its file."""

    tensor: Lazy = field(repr=False)
    code: str  # its dtype, "BF16"
    shape: tuple[int, ...]
    nbytes: int

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return self.nbytes // max(1, prod(self.shape))

    def data(self, source: Checkpoint) -> memoryview:
        """Its bytes."""
        tensor = self.tensor
        if tensor.is_copy:
            data = source.data(tensor.like)
            return memoryview(data.numpy())
        value = tensor.value(source).reshape(-1)
        data = value.view(torch.uint8)
        return memoryview(data.numpy())


@dataclass(frozen=True)
class Shard:
    """A file of a result."""

    metadata: dict[str, str]  # ``__metadata__``
    entries: dict[str, HeaderEntry]  # larger elements first, so that all are aligned

    def header(self) -> bytes:
        """Length and JSON of the header."""
        header = {"__metadata__": self.metadata}
        at = 0
        for name, entry in self.entries.items():
            end = at + entry.nbytes
            header[name] = {
                "dtype": entry.code,
                "shape": entry.shape,
                "data_offsets": [at, end],
            }
            at = end
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False)
        data = text.encode()
        padding = -len(data) % 8
        data += b" " * padding
        length = len(data)
        return length.to_bytes(8, "little") + data

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(entry.nbytes for entry in self.entries.values())


@dataclass(frozen=True)
class Layout:
    """The shards of a result by file name, and its index, where it has one."""

    shards: dict[str, Shard]
    index: dict | None = field(repr=False)


def lay_out(
    tensors: dict[str, Lazy], source: Checkpoint, metadata: dict[str, str]
) -> Layout:
    """The shards of the source, with `metadata` added; a new tensor is in the shard of
    the one that it is like.
    """
    shards = {}
    by_file = {}  # of the source
    for file, kept in source.metadata.items():
        # Safetensors notes there which tensor a tied one is saved as: one that is saved
        # itself is not tied.
        kept = {key: text for key, text in kept.items() if key not in tensors}
        name = file.replace("pytorch_model", "model")
        name = name.replace(".bin", ".safetensors")
        noted = {"format": "pt"} | kept | metadata
        shard = Shard(noted, {})
        by_file[file] = shard
        shards[name] = shard
    ordered = [name for name in source.tensors if name in tensors]
    ordered += sorted(tensors.keys() - source.tensors.keys())
    entries = {name: _entry(tensors[name], source) for name in ordered}
    ordered.sort(key=lambda name: -entries[name].width)
    for name in ordered:
        like = tensors[name].like
        file = source.tensors[like].file
        shard = by_file[file]
        shard.entries[name] = entries[name]
    index = None
    if source.index is not None:
        index = _index(shards, source.index)
    return Layout(shards, index)


def _entry(made: Lazy, source: Checkpoint) -> HeaderEntry:
    if made.is_copy:
        stored = source.tensors[made.like]
        return HeaderEntry(made, stored.code, stored.shape, stored.nbytes)
    dtype = made.dtype(source)
    shape = made.shape(source)
    nbytes = prod(shape) * dtype.itemsize
    return HeaderEntry(made, CODES[dtype], shape, nbytes)


def _index(shards: dict[str, Shard], before: dict) -> dict:
    files = {}
    size = 0
    count = 0
    for file, shard in shards.items():
        size += shard.nbytes
        for name, entry in shard.entries.items():
            count += prod(entry.shape)
            files[name] = file
    metadata = dict(before.get("metadata") or {})
    metadata["total_size"] = size
    metadata["total_parameters"] = count
    index = dict(before)
    index["metadata"] = metadata
    index["weight_map"] = dict(sorted(files.items()))
    return index

"""The files of a result and the tensors in them, in shards like those of the source."""

import json
from dataclasses import dataclass, field
from math import prod

from ..tensors import Lazy
from .source import CODES, Checkpoint


@dataclass
class Shard:
    """A file of a result: its header, its tensors, and how many bytes these have."""

    header: dict
    tensors: dict[str, Lazy] = field(default_factory=dict, repr=False)
    nbytes: int = 0

    def add(self, name: str, tensor: Lazy, source: Checkpoint) -> None:
        """Put a tensor behind the others."""
        dtype = tensor.dtype(source)
        shape = tensor.shape(source)
        end = self.nbytes + prod(shape) * dtype.itemsize
        self.header[name] = {
            "dtype": CODES[dtype],
            "shape": shape,
            "data_offsets": [self.nbytes, end],
        }
        self.tensors[name] = tensor
        self.nbytes = end

    def head(self) -> bytes:
        """Length and JSON of the header."""
        text = json.dumps(self.header)
        text += " " * (-len(text) % 8)
        length = len(text)
        return length.to_bytes(8, "little") + text.encode()


@dataclass(frozen=True)
class Layout:
    """The shards of a result by file name, and its index, where it has one."""

    shards: dict[str, Shard]
    index: dict | None


def lay_out(
    tensors: dict[str, Lazy], source: Checkpoint, metadata: dict[str, str]
) -> Layout:
    """The shards of the source, with `metadata` added; a new tensor is in the shard of
    the one that it is like.
    """
    shards = {}
    names = {}  # of the source's files
    for file, kept in source.metadata.items():
        # Safetensors notes there which tensor a tied one is saved as: one that is saved
        # itself is not tied.
        kept = {key: text for key, text in kept.items() if key not in tensors}
        noted = {"format": "pt"} | kept | metadata
        name = file.replace("pytorch_model", "model").replace(".bin", ".safetensors")
        names[file] = name
        shards[name] = Shard({"__metadata__": noted})

    def place(name: str) -> tuple:
        # as safetensors does, larger elements first, so that all are aligned
        dtype = tensors[name].dtype(source)
        return -dtype.itemsize, name

    weight_map = {}
    count = 0
    for name in sorted(tensors, key=place):
        tensor = tensors[name]
        stored = source.tensors[tensor.like]
        file = names[stored.file]
        shards[file].add(name, tensor, source)
        weight_map[name] = file
        count += prod(tensor.shape(source))
    if source.index is None:
        return Layout(shards, None)
    index = dict(source.index)
    size = sum(shard.nbytes for shard in shards.values())
    sizes = {"total_size": size, "total_parameters": count}
    index["metadata"] = (index.get("metadata") or {}) | sizes
    index["weight_map"] = dict(sorted(weight_map.items()))
    return Layout(shards, index)

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
        offsets = [self.nbytes, end]
        entry = {"dtype": CODES[dtype], "shape": shape, "data_offsets": offsets}
        self.header[name] = entry
        self.tensors[name] = tensor
        self.nbytes = end

    def head(self) -> bytes:
        """Length and JSON of the header."""
        text = json.dumps(self.header)
        text += " " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text.encode()


@dataclass(frozen=True)
class Layout:
    """The shards of a result by file name, its index, where it has one, and the tensors
    of all shards.
    """

    shards: dict[str, Shard]
    index: dict | None
    tensors: dict[str, Lazy] = field(repr=False)


def lay_out(
    tensors: dict[str, Lazy], source: Checkpoint, metadata: dict[str, str]
) -> Layout:
    """The shards of the source, with `metadata` added; a new tensor is in the shard of
    the one that it is like.
    """
    shards = {}
    for file, kept in source.metadata.items():
        # Safetensors notes there which tensor a tied one is saved as: one that is saved
        # itself is not tied.
        kept = {key: text for key, text in kept.items() if key not in tensors}
        noted = {"format": "pt"} | kept | metadata
        shards[_name_of(file)] = Shard({"__metadata__": noted})

    def place(name: str) -> tuple:
        # as safetensors does, larger elements first, so that all are aligned
        return -tensors[name].dtype(source).itemsize, name

    files = {}
    for name in sorted(tensors, key=place):
        files[name] = _name_of(source.tensors[tensors[name].like].file)
        shards[files[name]].add(name, tensors[name], source)
    index = source.index
    if index is not None:
        sizes = {
            "total_size": sum(shard.nbytes for shard in shards.values()),
            "total_parameters": sum(prod(t.shape(source)) for t in tensors.values()),
        }
        noted = (index.get("metadata") or {}) | sizes
        index = {**index, "metadata": noted, "weight_map": dict(sorted(files.items()))}
    return Layout(shards, index, tensors)


def _name_of(file: str) -> str:
    """The file of a result with the tensors of a file of the source."""
    return file.replace("pytorch_model", "model").replace(".bin", ".safetensors")

"""Which tensor of a result lies in which file: dtypes, shapes, headers and index, known before a byte is written."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from huggingface_hub import split_state_dict_into_shards_factory

from .expressions import Expression, Stored
from .shard import StoredTensor, make_header
from .source import INDEX
from .values import Values

MAX_SHARD_SIZE = "5GB"


@dataclass(frozen=True)
class ShardLayout:
    """The shards of a result; `changed` and `added` are tensors, where the shards are the source's."""

    tensors: dict[str, Expression] = field(repr=False)
    shards: dict[str, list[StoredTensor]]  # file name -> its tensors, in the order of their bytes
    headers: dict[str, bytes] = field(repr=False)  # file name -> length and JSON
    index: bytes | None = field(repr=False)  # bytes of its file; None where there is one shard
    changed: tuple[str, ...] = ()
    added: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.nbytes for held in self.shards.values() for tensor in held)


def as_source(tensors: dict[str, Expression], values: Values, metadata: Mapping[str, str] | None = None) -> ShardLayout:
    """The shards of the source: their names, their order, their headers where nothing in them changes.

    A new tensor follows the one that it is like, so that every tensor stays aligned to its element size. `metadata` is
    added to the ``__metadata__`` of every shard.
    """
    source = values.checkpoint
    added: dict[str, list[str]] = {}
    for name in tensors.keys() - source.tensors.keys():
        added.setdefault(tensors[name].like, []).append(name)
    shards, headers = {}, {}
    for shard in source.shards:
        names = [new for name in shard.tensors for new in (name, *sorted(added.get(name, ())))]
        shards[shard.name] = _in_order(names, tensors, values)
        kept = {**(shard.metadata or {}), **(metadata or {})}
        same = shard.header and not metadata and len(names) == len(shard.tensors)
        headers[shard.name] = shard.header if same else make_header(shards[shard.name], kept)
    new = {name: like for like, names in added.items() for name in names}
    index = None if source.index is None else _index_as_source(values, shards, new)
    changed = tuple(name for name, made in tensors.items() if name not in new and not isinstance(made, Stored))
    return ShardLayout(tensors, shards, headers, index, changed, tuple(sorted(new)))


def split(tensors: dict[str, Expression], values: Values, metadata: dict, max_shard_size: int | str) -> ShardLayout:
    """Shards of a size at most, as `save_pretrained` makes them."""
    sizes = {name: made.nbytes(values) for name, made in tensors.items()}
    parts = split_state_dict_into_shards_factory(
        sizes, get_storage_size=int, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
    ).filename_to_tensors
    shards = {file: _in_order(names, tensors, values) for file, names in parts.items()}
    headers = {file: make_header(held, metadata) for file, held in shards.items()}
    return ShardLayout(tensors, shards, headers, _index(shards) if len(shards) > 1 else None)


def _in_order(names: list[str], tensors: dict[str, Expression], values: Values) -> list[StoredTensor]:
    """Tensors one behind another."""
    placed, at = [], 0
    for name in names:
        made = tensors[name]
        placed.append(StoredTensor(name, made.dtype(values), made.shape(values), at, at := at + made.nbytes(values)))
    return placed


def _index(shards: dict[str, list[StoredTensor]]) -> bytes:
    held = [tensor for tensors in shards.values() for tensor in tensors]
    sizes = {"total_size": sum(t.nbytes for t in held), "total_parameters": sum(prod(t.shape) for t in held)}
    names = {tensor.name: file for file, tensors in shards.items() for tensor in tensors}
    return _json({"metadata": sizes, "weight_map": dict(sorted(names.items()))})


def _index_as_source(values: Values, shards: dict[str, list[StoredTensor]], added: dict[str, str]) -> bytes:
    source = values.checkpoint
    if source.index_name == INDEX and not added:
        return (source.folder / INDEX).read_bytes()
    shard_of = {shard.path.name: shard.name for shard in source.shards}
    names = {key: shard_of[name] for key, name in source.index["weight_map"].items()}
    names |= {key: source.tensors[old][0].name for key, old in added.items()}
    metadata = dict(source.index.get("metadata") or {})
    metadata["total_size"] = sum(tensor.nbytes for held in shards.values() for tensor in held)
    if "total_parameters" in metadata:
        metadata["total_parameters"] += sum(prod(values.stored(old).shape) for old in added.values())
    return _json({**source.index, "metadata": metadata, "weight_map": names})


def _json(data: dict) -> bytes:
    return (json.dumps(data, indent=2) + "\n").encode()

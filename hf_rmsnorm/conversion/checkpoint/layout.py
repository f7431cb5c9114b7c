"""The files of a result, and which tensors are in each."""

from __future__ import annotations

from dataclasses import dataclass, field

from huggingface_hub import split_state_dict_into_shards_factory

from ..tensors import Lazy, nbytes_of
from .source import Checkpoint

PATTERN = "model{suffix}.safetensors"


@dataclass(frozen=True)
class Layout:
    """The shards of a result.

    Args:
        tensors: of all shards, in the order in which the source has them.
        shards: file -> names of its tensors.
        metadata: ``__metadata__`` of each shard.
        index: of the shards; None if there is one file.
    """

    tensors: dict[str, Lazy] = field(repr=False)
    shards: dict[str, list[str]]
    metadata: dict[str, str]
    index: dict | None


def lay_out(
    tensors: dict[str, Lazy],
    source: Checkpoint,
    metadata: dict[str, str],
    max_shard_size: int | str,
) -> Layout:
    """Shards of at most a size, as `save_pretrained` makes them. They keep the metadata
    of the source's, and have `metadata` besides.
    """
    places = {name: place for place, name in enumerate(source.tensors)}
    ordered = sorted(tensors.items(), key=lambda item: places[item[1].like])
    tensors = dict(ordered)
    split = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda tensor: nbytes_of(tensor, source),
        filename_pattern=PATTERN,
        max_shard_size=max_shard_size,
    )
    # Safetensors notes there which tensor a tied one is saved as: one that is saved
    # itself is not tied.
    kept = {k: text for k, text in source.metadata.items() if k not in tensors}
    noted = {"format": "pt"} | kept | metadata
    index = None
    if split.is_sharded:
        weights = dict(sorted(split.tensor_to_filename.items()))
        index = {"metadata": split.metadata, "weight_map": weights}
    return Layout(tensors, split.filename_to_tensors, noted, index)

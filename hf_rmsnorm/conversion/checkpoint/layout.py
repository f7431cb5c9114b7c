"""The files of a result, and which tensors are in each: what `PlannedConversion.result`
returns, and `checkpoint/write.py` writes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from huggingface_hub import split_state_dict_into_shards_factory

from ..tensors import Lazy, nbytes_of
from .source import Checkpoint

PATTERN = "model{suffix}.safetensors"


@dataclass(frozen=True)
class Layout:
    """A result before it is written.

    Args:
        config: the text of config.json.
        tensors: of all shards.
        sizes: their bytes.
        shards: file -> names of its tensors.
        metadata: ``__metadata__`` of each shard.
        index: of the shards; None if there is one file.
    """

    config: str
    tensors: dict[str, Lazy] = field(repr=False)
    sizes: dict[str, int]
    shards: dict[str, list[str]]
    metadata: dict[str, str]
    index: dict | None

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(self.sizes.values())


def lay_out(
    tensors: dict[str, Lazy],
    config: str,
    source: Checkpoint,
    metadata: dict[str, str],
    max_shard_size: int | str,
) -> Layout:
    """Shards of at most a size, as `save_pretrained` makes them."""
    sizes = {name: nbytes_of(tensor, source) for name, tensor in tensors.items()}
    split = split_state_dict_into_shards_factory(
        sizes,
        get_storage_size=int,
        filename_pattern=PATTERN,
        max_shard_size=max_shard_size,
    )
    index = None
    if split.is_sharded:
        weights = dict(sorted(split.tensor_to_filename.items()))
        index = {"metadata": split.metadata, "weight_map": weights}
    shards = split.filename_to_tensors
    return Layout(config, tensors, sizes, shards, metadata, index)

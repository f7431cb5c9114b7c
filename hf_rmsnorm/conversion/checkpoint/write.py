"""Write a checkpoint whose tensors are made from those of another, shard by shard.

`convert_checkpoint` calls it with a working folder, and verifies what it wrote.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError
from safetensors.torch import save_file

from ..errors import ConversionError
from ..folders import INDEX
from ..tensors import Lazy
from .source import Checkpoint

PATTERN = "model{suffix}.safetensors"

Progress = Callable[[int, int, int], None]


def write_checkpoint(
    source: Checkpoint,
    tensors: dict[str, Lazy],
    metadata: dict[str, str],
    folder: Path,
    max_shard_size: int | str,
    progress: Progress | None = None,
) -> dict[str, int]:
    """Write tensors, and the source's other files, to an empty folder. One shard is in
    memory at a time, of at most that size, as `save_pretrained` makes them.

    Args:
        metadata: ``__metadata__`` of each shard.
        progress: as in `convert_checkpoint`.

    Returns:
        for each file of weights, the bytes of its tensors.
    """
    bare = source.without_values()
    sizes = {name: tensor.value(bare).nbytes for name, tensor in tensors.items()}
    split = split_state_dict_into_shards_factory(
        sizes,
        get_storage_size=int,
        filename_pattern=PATTERN,
        max_shard_size=max_shard_size,
    )
    total = sum(sizes.values())
    count = size = 0
    written = {}
    for file, names in split.filename_to_tensors.items():
        shard = {}
        for name in names:
            shard[name] = tensors[name].value(source).contiguous()
            count += 1
            size += sizes[name]
            if progress is not None:
                progress(count, size, total)
        _save(shard, folder / file, metadata)
        written[file] = sum(sizes[name] for name in names)
    if split.is_sharded:
        weights = dict(sorted(split.tensor_to_filename.items()))
        index = {"metadata": split.metadata, "weight_map": weights}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    for name in source.others:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source.folder / name, target)
    return written


def _save(shard: dict, path: Path, metadata: dict[str, str]) -> None:
    try:
        save_file(shard, path, metadata)
    except SafetensorError as error:  # also for errors of the file system
        raise ConversionError(
            f"{path}: cannot be written ({error}): see to it and convert again"
        ) from error

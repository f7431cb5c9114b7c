"""Write a checkpoint whose tensors are made from those of another, shard by shard.

`convert_checkpoint` calls it with a working folder, and verifies what it wrote.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from ..folders import CONFIG, INDEX
from .layout import Layout
from .source import Checkpoint

_OS_ERROR = re.compile(r"\(os error (\d+)\)")  # as Rust ends its messages

Progress = Callable[[int, int, int], None]


def write_checkpoint(
    source: Checkpoint,
    layout: Layout,
    folder: Path,
    progress: Progress | None = None,
) -> None:
    """Write the tensors of a layout, and the source's other files, to an empty folder.
    One shard is in memory at a time.

    Args:
        progress: as in `convert_checkpoint`.
    """
    count = size = 0
    for file, names in layout.shards.items():
        shard = {}
        for name in names:
            shard[name] = layout.tensors[name].value(source).contiguous()
            count += 1
            size += shard[name].nbytes
            if progress is not None:
                progress(count, size, layout.nbytes)
        _save(shard, folder / file, layout.metadata)
    _copy_files(source, folder)
    if layout.index is not None:
        (folder / INDEX).write_text(json.dumps(layout.index, indent=2) + "\n")
    (folder / CONFIG).write_text(layout.config, encoding="utf-8")


def _save(shard: dict, path: Path, metadata: dict[str, str]) -> None:
    """Write a shard; an error of the file system is an OSError, as elsewhere."""
    try:
        save_file(shard, path, metadata)
    except SafetensorError as error:
        code = _OS_ERROR.search(str(error))
        if code is None:
            raise
        number = int(code[1])
        raise OSError(number, os.strerror(number), str(path)) from error


def _copy_files(source: Checkpoint, folder: Path) -> None:
    for name in source.others:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source.folder / name, target)

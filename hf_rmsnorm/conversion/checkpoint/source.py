"""A checkpoint folder, opened: its tensors and its other files. It is only read.

`convert_checkpoint` opens the source; `tensors.py` reads one tensor after another of it.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from .. import folders
from ..errors import ConversionError

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder, opened; paths are relative to it. One in memory has tensors
    alone.
    """

    # on the meta device, where the data are in one of `files`
    tensors: dict[str, torch.Tensor]
    folder: Path = Path()
    config: dict = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)  # tensor -> safetensors file
    others: list[str] = field(default_factory=list)  # files to copy
    not_copied: dict[str, str] = field(default_factory=dict)  # file or folder -> why
    # of every file that is read: its size, and when it was written
    stamps: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that a model is loaded in, if config.json names one."""
        name = str(self.config.get("dtype") or self.config.get("torch_dtype"))
        dtype = getattr(torch, name.removeprefix("torch."), None)
        return dtype if dtype in FLOATS else None

    def read(self, name: str) -> torch.Tensor:
        """A copy of a tensor."""
        if name not in self.files:
            return self.tensors[name].detach().clone()
        try:
            with safe_open(self.folder / self.files[name], "pt") as file:
                return file.get_tensor(name).clone()
        except SafetensorError:
            self.check_unchanged()
            raise

    def check_unchanged(self) -> None:
        """Raise ConversionError if a file has changed since the folder was opened."""
        for name, stamp in self.stamps.items():
            path = self.folder / name
            if not path.exists() or _stamp(path) != stamp:
                raise ConversionError(
                    f"{path}: changed while it was read: let nothing write to the "
                    "source, and convert again"
                )

    def without_values(self) -> Checkpoint:
        """The same with its tensors on the meta device."""
        tensors = {name: tensor.to("meta") for name, tensor in self.tensors.items()}
        return Checkpoint(tensors, config=self.config)


def _stamp(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def open_checkpoint(
    folder: Path, allow_pickle: bool = False, weights: bool = True
) -> Checkpoint:
    """Look at a folder, and read its config and the headers of the weights that
    `from_pretrained` would load.

    Args:
        allow_pickle: read ``pytorch_model.bin`` if there is nothing else.
        weights: False where they may be missing, as for the plan of a hub's model.
    """
    names, not_copied = folders.files_below(folder)
    config = folders.config_of_folder(folder, names)
    main, shards = folders.files_of_weights(folder, names, allow_pickle)
    if weights and not shards:
        raise ConversionError(
            f"{folder}: neither model.safetensors nor its index: download what is "
            "missing, or rename a variant"
        )
    others = []
    for name in sorted({*names} - {folders.CONFIG, main, *shards}):
        why = folders.why_not_copied(name)
        if why:
            not_copied[name] = why
        else:
            others.append(name)
    for name in (*others, *shards):
        folders.refuse_elsewhere(folder, name)
    stamps = {name: _stamp(folder / name) for name in (*others, *shards)}
    source = Checkpoint({}, folder, config, {}, others, not_copied, stamps)
    for name in shards:
        _open_shard(source, name)
    return source


def _open_shard(source: Checkpoint, name: str) -> None:
    """Add the tensors of a file."""
    path = source.folder / name
    if path.suffix == ".bin":
        _open_pickle(source, path)
        return
    try:
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118 (no mapping)
                # a view of the mapped file: nothing is read yet
                source.tensors[key] = file.get_tensor(key).to("meta")
                source.files[key] = name
    except SafetensorError as error:
        raise ConversionError(
            f"{path}: truncated, corrupt ({error}), or a pointer of Git LFS: download "
            "it again, or run git lfs pull"
        ) from error


def _open_pickle(source: Checkpoint, path: Path) -> None:
    """Add the tensors of a file of `torch.save`, read without running code."""
    is_zip = zipfile.is_zipfile(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
        if not all(isinstance(tensor, torch.Tensor) for tensor in state.values()):
            raise TypeError("no tensor")
    except Exception as error:  # torch's own advice is to load it unsafely
        raise ConversionError(
            f"{path}: a pickle that is broken, runs code, or holds more than plain "
            "tensors: save the model by save_pretrained, where you trust it; or run git "
            "lfs pull"
        ) from error
    source.tensors.update(state)

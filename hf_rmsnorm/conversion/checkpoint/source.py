"""A checkpoint folder, opened read-only: its tensors, its other files, and clear
errors.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from ..folders import config_of_folder, files_of, main_file, shards_of, why_not_copied
from ..pickles import CODES, DTYPES, FLOATS, load_pickle
from ..plan import ConversionError, clear_errors


@dataclass(frozen=True)
class StoredTensor:
    """The place of a tensor; `start` counts bytes from the beginning of the file."""

    file: str
    code: str  # its dtype as in a header, "BF16"
    shape: tuple[int, ...]
    start: int
    nbytes: int

    @property
    def dtype(self) -> torch.dtype | None:
        return DTYPES.get(self.code)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder, opened; paths are relative to it."""

    folder: Path
    config: dict
    config_name: str
    tensors: dict[str, StoredTensor]
    metadata: dict[str, dict[str, str]]  # shard -> ``__metadata__`` of its header
    index: dict | None  # if the weights are in shards
    others: tuple[str, ...]  # files to copy
    not_copied: dict[str, str]  # file or folder -> why
    fingerprints: dict[str, list[int]]  # of every file that is read
    # the file that was read last, and its tensors
    _pickle: dict[str, dict] = field(default_factory=dict, repr=False)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that a model is loaded in, if config.json names one."""
        name = str(self.config.get("dtype") or self.config.get("torch_dtype"))
        dtype = getattr(torch, name.removeprefix("torch."), None)
        return dtype if dtype in FLOATS.values() else None

    def data(self, name: str, first: int = 0, last: int | None = None) -> torch.Tensor:
        """A copy of bytes [first, last) of a tensor, as uint8."""
        tensor = self.tensors[name]
        path = self.folder / tensor.file
        last = tensor.nbytes if last is None else last
        if path.suffix == ".bin":
            if tensor.file not in self._pickle:
                self._pickle.clear()
                self._pickle[tensor.file] = load_pickle(path)
            whole = self._pickle[tensor.file][name].contiguous()
            return whole.reshape(-1).view(torch.uint8)[first:last].clone()
        data = np.fromfile(path, np.uint8, last - first, offset=tensor.start + first)
        if len(data) < last - first:
            raise changed(path)
        return torch.from_numpy(data)

    def read(self, name: str, rows: torch.Tensor | None = None) -> torch.Tensor:
        """A tensor, or these rows of it."""
        stored = self.tensors[name]
        tensor = self.data(name).view(stored.dtype).view(stored.shape)
        return tensor if rows is None else tensor[rows]

    def check_unchanged(self) -> None:
        """Raise ConversionError if a file has changed since the folder was opened."""
        for name, before in self.fingerprints.items():
            path = self.folder / name
            if not path.exists() or _fingerprint(path) != before:
                raise changed(path)


def changed(path: Path) -> ConversionError:
    cure = "let nothing write to the source, and convert again with restart=True"
    return ConversionError(f"{path}: changed while it was read: {cure}")


def _fingerprint(path: Path) -> list[int]:
    return [path.stat().st_size, path.stat().st_mtime_ns]


def open_checkpoint(
    folder: str | os.PathLike,
    *,
    allow_pickle: bool = False,
    adapter: bool = False,
    weights: bool = True,
) -> Checkpoint:
    """Look at a folder, and read its config and the headers of the weights that
    `from_pretrained` would load.

    Args:
        allow_pickle: read ``pytorch_model.bin`` if there is nothing else.
        adapter: it is the folder of a PEFT adapter.
        weights: False where they may be missing, as for the plan of a hub's model.
    """
    folder = Path(folder)
    with clear_errors(folder):
        files, not_copied = files_of(folder)
        config_name, config = config_of_folder(folder, files, adapter)
        main = main_file(folder, files, config, adapter, weights, allow_pickle)
        index, shards = shards_of(folder, main)
        read = {config_name, main, *shards} - {None}
        why = {
            name: why_not_copied(folder, name, config)
            for name in files
            if name not in read
        }
        not_copied |= {name: reason for name, reason in why.items() if reason}
        others = tuple(name for name, reason in why.items() if not reason)
        fingerprints = {
            name: _fingerprint(folder / name) for name in sorted({*read, *others})
        }
        opened = {name: _open_shard(folder, name) for name in shards}
    tensors = {
        key: tensor for _, stored in opened.values() for key, tensor in stored.items()
    }
    metadata = {name: kept for name, (kept, _) in opened.items()}
    return Checkpoint(
        folder,
        config,
        config_name,
        tensors,
        metadata,
        index,
        others,
        not_copied,
        fingerprints,
    )


def _open_shard(
    folder: Path, name: str
) -> tuple[dict[str, str], dict[str, StoredTensor]]:
    """``__metadata__`` and tensors of a file, in the order of their bytes."""
    path = folder / name
    with open(path, "rb") as file:
        if file.read(23) == b"version https://git-lfs":
            raise ConversionError(
                f"{path}: a pointer of Git LFS, and not the file: run git lfs pull in its folder"
            )
    if path.suffix == ".bin":
        state = load_pickle(path)
        tensors = {
            key: StoredTensor(name, CODES[t.dtype], tuple(t.shape), 0, t.nbytes)
            for key, t in state.items()
        }
        return {"format": "pt"}, tensors
    try:
        with safe_open(path, "pt"):
            # the library's own check of lengths, offsets, shapes and dtypes
            pass
    except SafetensorError as error:
        raise ConversionError(
            f"{path}: truncated or corrupt ({error}): download it again"
        ) from error
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(length))
    metadata = entries.pop("__metadata__", None) or {}
    tensors = {}
    for key in sorted(entries, key=lambda key: entries[key]["data_offsets"]):
        entry = entries[key]
        first, last = entry["data_offsets"]
        tensors[key] = StoredTensor(
            name,
            entry["dtype"],
            tuple(entry["shape"]),
            8 + length + first,
            last - first,
        )
    return metadata, tensors

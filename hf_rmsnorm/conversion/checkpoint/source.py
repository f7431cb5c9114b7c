"""A checkpoint folder, opened read-only: its tensors, its other files, and clear
errors.
"""

import json
import os
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from ..folders import (
    CONFIG,
    config_of_folder,
    files_of,
    main_file,
    shards_of,
    why_not_copied,
)
from ..plan import ConversionError, clear_errors

FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
# As headers name them; of another dtype a tensor keeps its bytes.
DTYPES = FLOATS | {
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}


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
    tensors: dict[str, StoredTensor]
    metadata: dict[str, dict[str, str]]  # shard -> ``__metadata__`` of its header
    index: dict | None  # if the weights are in shards
    others: list[str]  # files to copy
    not_copied: dict[str, str]  # file or folder -> why
    fingerprints: dict[str, list[int]]  # of every file that is read
    pickled: dict[str, torch.Tensor] = field(repr=False)  # those of files of torch.save

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that a model is loaded in, if config.json names one."""
        name = str(self.config.get("dtype") or self.config.get("torch_dtype"))
        dtype = getattr(torch, name.removeprefix("torch."), None)
        return dtype if dtype in FLOATS.values() else None

    def data(self, name: str) -> torch.Tensor:
        """A copy of the bytes of a tensor, as uint8."""
        if name in self.pickled:
            whole = self.pickled[name].contiguous().reshape(-1)
            return whole.view(torch.uint8).clone()
        tensor = self.tensors[name]
        path = self.folder / tensor.file
        data = np.fromfile(path, np.uint8, tensor.nbytes, offset=tensor.start)
        if len(data) < tensor.nbytes:
            raise changed(path)
        return torch.from_numpy(data)

    def read(self, name: str) -> torch.Tensor:
        """A tensor."""
        stored = self.tensors[name]
        return self.data(name).view(stored.dtype).view(stored.shape)

    def check_unchanged(self) -> None:
        """Raise ConversionError if a file has changed since the folder was opened."""
        for name, before in self.fingerprints.items():
            path = self.folder / name
            if not path.exists() or _fingerprint(path) != before:
                raise changed(path)


def changed(path: Path) -> ConversionError:
    return ConversionError(
        f"{path}: changed while it was read: let nothing write to the source, and "
        "convert again with restart=True"
    )


def _fingerprint(path: Path) -> list[int]:
    return [path.stat().st_size, path.stat().st_mtime_ns]


def open_checkpoint(
    folder: str | os.PathLike, *, allow_pickle: bool = False, weights: bool = True
) -> Checkpoint:
    """Look at a folder, and read its config and the headers of the weights that
    `from_pretrained` would load.

    Args:
        allow_pickle: read ``pytorch_model.bin`` if there is nothing else.
        weights: False where they may be missing, as for the plan of a hub's model.
    """
    folder = Path(folder)
    with clear_errors(folder):
        files, not_copied = files_of(folder)
        config = config_of_folder(folder, files)
        main = main_file(folder, files, allow_pickle)
        if main is None and weights:
            raise ConversionError(
                f"{folder}: no model.safetensors: download the weights, or write them "
                "by save_pretrained"
            )
        index, shards = shards_of(folder, main, files)
        source = Checkpoint(folder, config, {}, {}, index, [], not_copied, {}, {})
        made_anew = {CONFIG, main, *shards}
        for name in sorted(files):
            reason = why_not_copied(name)
            if name not in made_anew and reason:
                not_copied[name] = reason
                continue
            if name not in made_anew:
                source.others.append(name)
            source.fingerprints[name] = _fingerprint(folder / name)
        for name in shards:
            _open_shard(source, name)
    return source


def _open_shard(source: Checkpoint, name: str) -> None:
    """Add the tensors of a file, in the order of their bytes, and its metadata."""
    path = source.folder / name
    with open(path, "rb") as file:
        if file.read(23) == b"version https://git-lfs":
            raise ConversionError(
                f"{path}: a pointer of Git LFS, not the file: run git lfs pull in its "
                "folder"
            )
    if path.suffix == ".bin":
        source.metadata[name] = {"format": "pt"}
        for key, tensor in _load_pickle(path).items():
            code = CODES[tensor.dtype]
            shape = tuple(tensor.shape)
            source.tensors[key] = StoredTensor(name, code, shape, 0, tensor.nbytes)
            source.pickled[key] = tensor
        return
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
    source.metadata[name] = entries.pop("__metadata__", None) or {}
    for key in sorted(entries, key=lambda key: entries[key]["data_offsets"]):
        entry = entries[key]
        code = entry["dtype"]
        shape = tuple(entry["shape"])
        first, last = entry["data_offsets"]
        start = 8 + length + first
        source.tensors[key] = StoredTensor(name, code, shape, start, last - first)


def _load_pickle(path: Path) -> dict[str, torch.Tensor]:
    """The state dict of a file of `torch.save`, read without running code."""
    is_zip = zipfile.is_zipfile(path)
    cure = "save the model by save_pretrained, where you trust it"
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as error:  # torch's own advice is to load it unsafely
        raise ConversionError(
            f"{path}: a pickle that is broken, or runs code: {cure}"
        ) from error
    values = state.values() if isinstance(state, dict) else [None]
    for value in values:
        if not isinstance(value, torch.Tensor) or value.dtype not in CODES:
            raise ConversionError(
                f"{path}: holds more than plain tensors, as a checkpoint of training "
                f"does: {cure}"
            )
    return state

"""A checkpoint folder, opened: its tensors and its other files. It is only read."""

from __future__ import annotations

import json
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from .. import folders
from ..errors import ConversionError, clear_errors

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# as headers name them
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class StoredTensor:
    """The place of a tensor; `start` counts bytes from the beginning of the file."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    start: int = 0
    data: torch.Tensor | None = None  # of one in memory


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder, opened; paths are relative to it. One in memory has tensors
    alone.
    """

    folder: Path
    config: dict
    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]  # ``__metadata__`` of all shards
    others: list[str]  # files to copy
    not_copied: dict[str, str]  # file or folder -> why
    fingerprints: dict[str, list[int]]  # of every file that is read

    @classmethod
    def in_memory(cls, tensors: dict[str, torch.Tensor]) -> Checkpoint:
        """The tensors of a model."""
        held = {}
        for name, data in tensors.items():
            shape = tuple(data.shape)
            held[name] = StoredTensor("", data.dtype, shape, data.nbytes, data=data)
        return cls(Path(), {}, held, {}, [], {}, {})

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that a model is loaded in, if config.json names one."""
        name = str(self.config.get("dtype") or self.config.get("torch_dtype"))
        dtype = getattr(torch, name.removeprefix("torch."), None)
        return dtype if dtype in FLOATS else None

    def read(self, name: str) -> torch.Tensor:
        """A copy of a tensor."""
        stored = self.tensors[name]
        if stored.data is not None:
            return stored.data.detach().clone()
        data = torch.empty(stored.nbytes, dtype=torch.uint8)
        with open(self.folder / stored.file, "rb") as file:
            file.seek(stored.start)
            count = file.readinto(data.numpy())
        if count < stored.nbytes:
            self.check_unchanged()
        return data[:count].view(stored.dtype).view(stored.shape)

    def check_unchanged(self) -> None:
        """Raise ConversionError if a file has changed since the folder was opened."""
        for name, before in self.fingerprints.items():
            path = self.folder / name
            if not path.exists() or _fingerprint(path) != before:
                raise ConversionError(
                    f"{path}: changed while it was read: let nothing write to the "
                    "source, and convert again"
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
        files, not_copied = folders.files_of(folder)
        config = folders.config_of_folder(folder, files)
        shards, of_weights = folders.weights_of(folder, files, allow_pickle)
        if weights and not shards:
            raise ConversionError(
                f"{folder}: no model.safetensors: download the weights, or write them "
                "by save_pretrained"
            )
        others, left_out = folders.copied_of(files, of_weights)
        for name in (*of_weights, *others):
            folders.refuse_elsewhere(folder, name)
        not_copied |= left_out
        read = sorted({*files} - left_out.keys())
        fingerprints = {name: _fingerprint(folder / name) for name in read}
        source = Checkpoint(folder, config, {}, {}, others, not_copied, fingerprints)
        for name in shards:
            _open_shard(source, name)
    return source


def _open_shard(source: Checkpoint, name: str) -> None:
    """Add the tensors of a file, and its metadata."""
    path = source.folder / name
    with open(path, "rb") as file:
        if file.read(23) == b"version https://git-lfs":
            raise ConversionError(f"{path}: a pointer of Git LFS: run git lfs pull")
    if path.suffix == ".bin":
        _open_pickle(source, name)
        return
    try:
        with safe_open(path, "pt"):  # which checks the header
            pass
    except SafetensorError as error:
        raise ConversionError(
            f"{path}: truncated or corrupt ({error}): download it again"
        ) from error
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    source.metadata.update(header.pop("__metadata__", None) or {})
    for key, entry in header.items():
        dtype = DTYPES.get(entry["dtype"])
        if dtype is None:
            raise ConversionError(
                f"{path}: {key} is {entry['dtype']}: convert the unquantised model"
            )
        shape = tuple(entry["shape"])
        first, last = entry["data_offsets"]
        start = 8 + length + first
        source.tensors[key] = StoredTensor(name, dtype, shape, last - first, start)


def _open_pickle(source: Checkpoint, name: str) -> None:
    """Add the tensors of a file of `torch.save`, read without running code."""
    path = source.folder / name
    is_zip = zipfile.is_zipfile(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
        for key, tensor in state.items():
            if tensor.dtype not in DTYPES.values():
                raise TypeError(f"{key} is {tensor.dtype}")
            sizes = tensor.dtype, tuple(tensor.shape), tensor.nbytes
            source.tensors[key] = StoredTensor(name, *sizes, data=tensor)
    except Exception as error:  # torch's own advice is to load it unsafely
        raise ConversionError(
            f"{path}: a pickle that is broken, runs code, or holds more than plain "
            "tensors: save the model by save_pretrained, where you trust it"
        ) from error

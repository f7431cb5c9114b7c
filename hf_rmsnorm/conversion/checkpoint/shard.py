"""One file of a checkpoint: where its tensors lie, and how their bytes are read.

A file that `torch.save` wrote is read without running the code that a pickle may bring.
"""

import errno
import json
import pickle
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPES = FLOATS | {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
DTYPES |= {"BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
CODES = {dtype: code for code, dtype in DTYPES.items()}


class ConversionError(Exception):
    """What is wrong, where, and what to do about it, in one line. DST does not exist and SRC is as it was."""


@contextmanager
def clear_errors(where: Path) -> Iterator[None]:
    """What the system says about a file, as one line with the cure."""
    try:
        yield
    except OSError as error:
        path = error.filename or where
        cure = {
            errno.ENOSPC: "free some space and convert again, it goes on where it stopped",
            errno.EDQUOT: "free some of the quota and convert again, it goes on where it stopped",
            errno.EFBIG: "raise the limit of the file size and convert again, it goes on where it stopped",
            errno.ENOENT: "put it there, or mend the link that leads to it, and convert again",
            errno.EROFS: "choose a DST on a file system that can be written",
            errno.EACCES: "give permission to it, or choose another DST",
            errno.EPERM: "give permission to it, or choose another DST",
        }.get(error.errno, "see to it and convert again, it goes on where it stopped")
        reason = error.strerror or str(error)
        raise ConversionError(f"{path}: {reason[:1].lower()}{reason[1:]}: {cure}") from error


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies in its shard: `start` and `stop` count bytes from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class SafetensorsShard:
    """One file of the checkpoint."""

    path: Path
    name: str  # of the shard that is written from it
    header: bytes  # length and JSON as stored, so that an unchanged header stays the same to the byte
    metadata: dict[str, str] | None
    tensors: dict[str, StoredTensor]  # in the order of their bytes, without a gap

    def read(self, tensor: StoredTensor, first: int, last: int) -> np.ndarray:
        """Bytes [first, last) of a tensor, as a vector of uint8."""
        data = np.empty(last - first, np.uint8)
        with suppress(FileNotFoundError), open(self.path, "rb") as file:
            file.seek(len(self.header) + tensor.start + first)
            if file.readinto(data) == len(data):
                return data
        raise changed(self.path)


def changed(path: Path) -> ConversionError:
    cure = "let nothing write to the source, and convert again with restart=True"
    return ConversionError(f"{path}: changed while it was read: {cure}")


def fingerprint(path: Path) -> list[int]:
    """Size and mtime_ns of a file."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def open_safetensors(path: Path) -> SafetensorsShard:
    """Lay out a safetensors file by its header; an error says where it is truncated or corrupt."""
    try:
        with safe_open(path, "pt"):  # the library's own check of lengths, offsets, shapes and dtypes
            pass
    except SafetensorError as error:
        raise ConversionError(f"{path}: truncated or corrupt ({error}): download it again") from error
    with open(path, "rb") as file:
        prefix = file.read(8)
        header = prefix + file.read(struct.unpack("<Q", prefix)[0])
    entries = json.loads(header[8:])
    metadata = entries.pop("__metadata__", None)  # in the order of the file; the library gives another in each process
    tensors = [StoredTensor(k, e["dtype"], tuple(e["shape"]), *e["data_offsets"]) for k, e in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.stop))
    return SafetensorsShard(path, path.name, header, metadata, {tensor.name: tensor for tensor in tensors})


@dataclass(frozen=True)
class PickledShard(SafetensorsShard):
    """A pickled file, laid out as the safetensors shard that is written from it; its `header` is empty."""

    def read(self, tensor, first, last):
        return _contiguous(self.path, tensor.name)[first:last]


@lru_cache(maxsize=1)  # one copy at a time, where the file holds a transposed or sliced view
def _contiguous(path: Path, name: str) -> np.ndarray:
    return _load(path)[name].contiguous().reshape(-1).view(torch.uint8).numpy()


def forget_pickles() -> None:
    """Close the pickled files that were read, and free what is in memory of them."""
    _contiguous.cache_clear()
    _load.cache_clear()


def open_pickled(path: Path) -> PickledShard:
    """Lay out a pickled file; an error says where it is no flat mapping to plain tensors, or needs code to be read."""
    tensors, start = {}, 0
    # Largest elements first, as safetensors writes them: then every tensor is aligned.
    for name, tensor in sorted(_load(path).items(), key=lambda item: (-item[1].itemsize, item[0])):
        place = (start, start := start + tensor.nbytes)
        tensors[name] = StoredTensor(name, CODES[tensor.dtype], tuple(tensor.shape), *place)
    name = path.name.replace("pytorch_model", "model", 1).removesuffix(".bin") + ".safetensors"
    return PickledShard(path, name, b"", {"format": "pt"}, tensors)  # Transformers asks for the format


@lru_cache(maxsize=4)
def _load(path: Path) -> dict[str, torch.Tensor]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        reason = str(error).split("\n")[0]
        why = f"torch.load(weights_only=True) refuses it ({reason})"
        raise ConversionError(f"{path}: {why}: save the model as safetensors instead") from error
    for name, tensor in state.items() if isinstance(state, dict) else [("the file", state)]:
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.dtype not in CODES:
            what = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise ConversionError(f"{path}: {name} is no plain tensor ({what}): save the model's state dict instead")
    return state


def make_header(tensors: list[StoredTensor], metadata: dict[str, str] | None) -> bytes:
    """Length and JSON of a header, padded so that every tensor is aligned."""
    header: dict = {"__metadata__": metadata} if metadata else {}
    for tensor in tensors:
        offsets = [tensor.start, tensor.stop]
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text

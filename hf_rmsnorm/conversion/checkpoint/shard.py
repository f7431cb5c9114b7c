"""One file of a checkpoint: where its tensors lie, and how their bytes are read."""

from __future__ import annotations

import errno
import json
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
CODES = {dtype: code for code, dtype in FLOATS.items()} | {
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


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


Read = Callable[[StoredTensor, int, int], np.ndarray]


@dataclass(frozen=True)
class SafetensorsShard:
    """One file of the checkpoint.

    Args:
        path: the file.
        name: of the shard that is written from it.
        header: length and JSON as stored, so that an unchanged header stays the same to the byte.
        metadata: ``__metadata__``, None where there is none.
        tensors: in the order of their bytes, without a gap.
    """

    path: Path
    name: str
    header: bytes
    metadata: dict[str, str] | None
    tensors: dict[str, StoredTensor]

    @contextmanager
    def reading(self) -> Iterator[Read]:
        """A function that reads bytes [first, last) of a tensor, as a vector of uint8."""
        fd = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))

        def read(tensor: StoredTensor, first: int, last: int) -> np.ndarray:
            data = np.empty(last - first, np.uint8)
            view, at = memoryview(data), len(self.header) + tensor.start + first
            while view:
                count = os.preadv(fd, [view], at)
                if count == 0:
                    raise changed(self.path)
                view, at = view[count:], at + count
            return data

        try:
            yield read
        finally:
            os.close(fd)


def changed(path: Path) -> ConversionError:
    return ConversionError(
        f"{path}: changed while it was read: let nothing write to the source, and convert again with restart"
    )


def fingerprint(path: Path) -> list[int]:
    """Size and mtime_ns of a file."""
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns]


@contextmanager
def _opened(path: Path):
    try:
        with safe_open(path, "pt") as file:
            yield file
    except SafetensorError as error:
        raise ConversionError(f"{path}: truncated or corrupt ({error}): download it again") from error


def read_keys(path: Path) -> list[str]:
    """Names of the tensors of a safetensors file.

    Raises:
        ConversionError: it is truncated or corrupt.
    """
    with _opened(path) as file:
        return list(file.keys())


def open_safetensors(path: Path) -> SafetensorsShard:
    """Read the header of a safetensors file.

    Raises:
        ConversionError: it is truncated or corrupt.
    """
    with _opened(path):  # the library's own check of lengths, offsets, shapes and dtypes
        pass
    with open(path, "rb") as file:
        prefix = file.read(8)
        header = prefix + file.read(struct.unpack("<Q", prefix)[0])
    entries = json.loads(header[8:])
    metadata = entries.pop("__metadata__", None)  # in the order of the file; the library gives another in each process
    tensors = [
        StoredTensor(name, entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"])
        for name, entry in entries.items()
    ]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.stop))
    return SafetensorsShard(path, path.name, header, metadata, {tensor.name: tensor for tensor in tensors})


def make_header(tensors: list[StoredTensor], metadata: dict[str, str] | None) -> bytes:
    """Length and JSON of a header, padded so that every tensor is aligned."""
    header: dict = {"__metadata__": metadata} if metadata else {}
    for tensor in tensors:
        offsets = [tensor.start, tensor.stop]
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text

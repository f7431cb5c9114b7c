"""The tensors that others are computed from: those of an open checkpoint, or some in memory."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from .shard import CODES, FLOATS, ConversionError, Read, SafetensorsShard, StoredTensor, clear_errors
from .source import Checkpoint, open_checkpoint

COPIED = 1 << 20  # bytes of an unchanged tensor that are in memory at a time
OPEN = 4  # files at a time


class Values(Protocol):
    """Tensors that are read in pieces, by their place in the order of storage.

    Attributes:
        kept: what is worked out once for one tensor, by whom; whoever has made that tensor clears it.
    """

    kept: dict[Any, torch.Tensor]

    def names(self) -> Collection[str]:
        """Of all tensors."""

    def floating(self, key: str, purpose: str = "") -> StoredTensor:
        """Shape and dtype of a tensor that is to be computed with.

        Args:
            purpose: what it is to do, for the error.

        Raises:
            ConversionError: there is none of this name, or it is quantised.
        """

    def stored(self, key: str) -> StoredTensor:
        """As `floating`, of any dtype."""

    def elements(self, key: str, first: int, last: int) -> torch.Tensor:
        """Elements [first, last) in float64, shape (last - first,), in memory of their own."""

    def raw(self, key: str) -> Iterator[np.ndarray]:
        """The bytes, in pieces."""


class MemoryValues:
    """Tensors in memory as `Values`; `aliases` are other names that they may have."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], aliases: Mapping[str, str] | None = None):
        self.kept: dict = {}
        aliases = aliases or {}
        self.tensors = {**tensors, **{key: tensors[old] for key, old in aliases.items() if old in tensors}}

    def names(self):
        return self.tensors.keys()

    def stored(self, key):
        if key not in self.tensors:
            raise ConversionError(f"there is no tensor {key}, which the plan names: make the plan for this model")
        tensor = self.tensors[key]
        return StoredTensor(key, CODES[tensor.dtype], tuple(tensor.shape), 0, tensor.nbytes)

    def floating(self, key, purpose=""):
        return self.stored(key)

    def elements(self, key, first, last):
        return self.tensors[key].detach().reshape(-1)[first:last].to(torch.float64, copy=True)

    def raw(self, key):
        yield self.tensors[key].detach().contiguous().reshape(-1).view(torch.uint8).numpy()


class FileValues:
    """The tensors of an open checkpoint as `Values`.

    Args:
        checkpoint: whose files are opened when they are read.
        aliases: other names that a tensor may have in it.
    """

    def __init__(self, checkpoint: Checkpoint, aliases: Mapping[str, str] | None = None):
        self.checkpoint, self.aliases = checkpoint, dict(aliases or {})
        self.kept: dict = {}
        self._open: dict[Path, tuple[ExitStack, Read]] = {}

    def close(self) -> None:
        """Close the files."""
        for stack, _ in self._open.values():
            stack.close()
        self._open.clear()

    def names(self):
        return self.checkpoint.tensors.keys()

    def called(self, key: str) -> str:
        """The name of a tensor in the checkpoint."""
        return key if key in self.checkpoint.tensors else self.aliases.get(key, key)

    def _find(self, key: str) -> tuple[SafetensorsShard, StoredTensor]:
        name = self.called(key)
        if name not in self.checkpoint.tensors:
            raise ConversionError(
                f"{self.checkpoint.folder}: no tensor {key}: the checkpoint is not whole, download it again"
            )
        return self.checkpoint.tensors[name]

    def stored(self, key):
        return self._find(key)[1]

    def floating(self, key, purpose=""):
        shard, tensor = self._find(key)
        if tensor.dtype not in FLOATS:
            purpose = purpose and f" and {purpose}"
            raise ConversionError(
                f"{shard.path}: {key} is {tensor.dtype}{purpose}: it is quantised; convert the unquantised model, then "
                "quantise it"
            )
        return tensor

    def elements(self, key, first, last):
        tensor = self.floating(key)
        dtype = FLOATS[tensor.dtype]
        raw = self._reader(self._find(key)[0])(tensor, first * dtype.itemsize, last * dtype.itemsize)
        return torch.from_numpy(raw).view(dtype).to(torch.float64, copy=True)

    def raw(self, key):
        shard, tensor = self._find(key)
        for first in range(0, tensor.nbytes, COPIED):
            yield self._reader(shard)(tensor, first, min(tensor.nbytes, first + COPIED))

    def _reader(self, shard: SafetensorsShard) -> Read:
        if shard.path not in self._open:
            if len(self._open) == OPEN:
                oldest = next(iter(self._open))
                self._open.pop(oldest)[0].close()
            stack = ExitStack()
            self._open[shard.path] = stack, stack.enter_context(shard.reading())
        return self._open[shard.path][1]


@contextmanager
def open_values(src, *, allow_pickle: bool = False, adapter: bool = False) -> Iterator[FileValues]:
    """The tensors of a checkpoint folder, as `open_checkpoint` opens it.

    Raises:
        ConversionError: as `open_checkpoint`, or the system refused a file.
    """
    with clear_errors(Path(src)):
        values = FileValues(open_checkpoint(src, allow_pickle=allow_pickle, adapter=adapter))
    try:
        yield values
    finally:
        values.close()

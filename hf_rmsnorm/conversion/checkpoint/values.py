"""The tensors that others are computed from: those of an open checkpoint, or in memory."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .shard import CODES, FLOATS, ConversionError, StoredTensor, clear_errors, forget_pickles
from .source import Checkpoint, open_checkpoint

COPIED = 1 << 20  # bytes of an unchanged tensor that are in memory at a time


class Values:
    """Tensors by name, read in pieces by their place in the order of storage.

    Args:
        given: those in memory; they come before those of the checkpoint.
    """

    def __init__(self, given: Mapping[str, torch.Tensor] = {}, checkpoint: Checkpoint | None = None):
        self.given, self.checkpoint = dict(given), checkpoint
        self.kept: dict[Any, torch.Tensor] = {}  # by `once`; whoever has made the tensor clears it

    def names(self) -> Collection[str]:
        """Of the checkpoint's tensors, or where there is none, of those in memory."""
        return self.checkpoint.tensors.keys() if self.checkpoint else self.given.keys()

    def stored(self, key: str, purpose: str | None = None) -> StoredTensor:
        """Shape and dtype of a tensor; refused where there is none, or where it is quantised and has a purpose.

        Args:
            purpose: that it is to be computed with, and for what; None for a tensor of any dtype.
        """
        if key in self.given:
            tensor = self.given[key]
            return StoredTensor(key, CODES[tensor.dtype], tuple(tensor.shape), 0, tensor.nbytes)
        if key not in self.names():
            where = self.checkpoint.folder if self.checkpoint else "the model"
            raise ConversionError(f"{where}: no tensor {key}: the checkpoint is not whole, download it again")
        shard, tensor = self.checkpoint.tensors[key]
        if purpose is not None and tensor.dtype not in FLOATS:
            what = f"{key} is {tensor.dtype}{purpose and f' and {purpose}'}: it is quantised"
            raise ConversionError(f"{shard.path}: {what}; convert the unquantised model, then quantise that")
        return tensor

    def once(self, owner: Any, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What `make` gives, worked out once for the tensor that is being made."""
        if owner not in self.kept:
            self.kept[owner] = make()
        return self.kept[owner]

    def elements(self, key: str, first: int, last: int) -> torch.Tensor:
        """Elements [first, last) in float64, shape (last - first,), in memory of their own."""
        if key in self.given:
            return self.given[key].detach().reshape(-1)[first:last].to(torch.float64, copy=True)
        tensor = self.stored(key, "")
        dtype = FLOATS[tensor.dtype]
        raw = self._read(key, tensor, first * dtype.itemsize, last * dtype.itemsize)
        return torch.from_numpy(raw).view(dtype).to(torch.float64, copy=True)

    def raw(self, key: str) -> Iterator[np.ndarray]:
        """The bytes, in pieces."""
        if key in self.given:
            yield self.given[key].detach().contiguous().reshape(-1).view(torch.uint8).numpy()
            return
        tensor = self.stored(key)
        for first in range(0, tensor.nbytes, COPIED):
            yield self._read(key, tensor, first, min(tensor.nbytes, first + COPIED))

    def _read(self, key: str, tensor: StoredTensor, first: int, last: int) -> np.ndarray:
        return self.checkpoint.tensors[key][0].read(tensor, first, last)


@contextmanager
def open_values(src, *, allow_pickle: bool = False, adapter: bool = False) -> Iterator[Values]:
    """The tensors of a checkpoint folder, as `open_checkpoint` opens it."""
    try:
        with clear_errors(Path(src)):
            values = Values(checkpoint=open_checkpoint(src, allow_pickle=allow_pickle, adapter=adapter))
        yield values
    finally:
        forget_pickles()

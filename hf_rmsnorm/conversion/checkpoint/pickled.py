"""Shards that `torch.save` wrote, read without running the code that a pickle may bring."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from .shard import CODES, ConversionError, Read, SafetensorsShard, StoredTensor


@dataclass(frozen=True)
class PickledShard(SafetensorsShard):
    """A pickled file, laid out as the safetensors shard that is written from it; its `header` is empty."""

    @contextmanager
    def reading(self) -> Iterator[Read]:
        tensors = _load(self.path)
        latest = None

        def read(tensor: StoredTensor, first: int, last: int) -> np.ndarray:
            nonlocal latest  # one contiguous copy at a time, where the file holds a transposed or sliced view
            if latest is None or latest[0] != tensor.name:
                latest = (tensor.name, tensors[tensor.name].contiguous().reshape(-1).view(torch.uint8).numpy())
            return latest[1][first:last]

        yield read


def open_pickled(path: Path) -> PickledShard:
    """Lay out a pickled shard.

    Raises:
        ConversionError: not a flat mapping from names to plain tensors, or one that needs code to be read.
    """
    tensors, start = {}, 0
    # Largest elements first, as safetensors writes them: then every tensor is aligned.
    for name, tensor in sorted(_load(path).items(), key=lambda item: (-item[1].itemsize, item[0])):
        stop = start + tensor.numel() * tensor.itemsize
        tensors[name] = StoredTensor(name, CODES[tensor.dtype], tuple(tensor.shape), start, stop)
        start = stop
    name = path.name.replace("pytorch_model", "model", 1).removesuffix(".bin") + ".safetensors"
    return PickledShard(path, name, b"", {"format": "pt"}, tensors)  # Transformers asks for the format


def _load(path: Path) -> dict[str, torch.Tensor]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        reason = str(error).split("\n")[0]
        raise ConversionError(
            f"{path}: torch.load(weights_only=True) refuses it ({reason}): save the model as safetensors instead"
        ) from error
    for name, tensor in state.items() if isinstance(state, dict) else [("the file", state)]:
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.dtype not in CODES:
            what = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise ConversionError(f"{path}: {name} is no plain tensor ({what}): save the model's state dict instead")
    return state

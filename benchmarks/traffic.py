"""Counts kernels and the bytes they move, for a whole decoder layer and for its norms,
sums and rotary embedding.
"""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# functions, not modules
ROTARY = (
    "apply_rotary_pos_emb",
    "liger_rotary_pos_emb",
    "norm_and_rotate",
    "rotate_together",
)


class Traffic(TorchDispatchMode):
    """Counts the torch operators of a layer; `launched` is called for each Triton
    kernel.

    An operator counts as one kernel. It reads its tensors once and writes its results
    once; a view is free, and so is an allocation.

    Attributes:
        kernels: of the whole layer.
        fusible: kernels and bytes of its norms, its residual sums and its rotary
            embedding.
    """

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer
        self.norms = {
            module for path, module in layer.named_modules() if path.endswith("norm")
        }
        self.kernels = 0
        self.fusible: Counter = Counter(kernels=0, bytes=0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        operands = _tensors((args, kwargs))
        results = _tensors(result)
        if not _is_free(func, operands, results):
            self.launched(sum(map(distinct_bytes, operands + results)))
        return result

    def launched(self, moved: int) -> None:
        """Count a kernel that moved so many bytes."""
        self.kernels += 1
        if self._is_fusible(sys._getframe(1)):
            self.fusible.update(kernels=1, bytes=moved)

    def _is_fusible(self, frame: FrameType | None) -> bool:
        """Whether the innermost module or known function that runs is a norm, the layer
        itself or a rotary embedding.

        Outside of its submodules a layer computes its residual sums alone.
        """
        while frame is not None:
            if frame.f_code.co_name in ROTARY:
                return True
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module):
                return module is self.layer or module in self.norms
            frame = frame.f_back
        raise RuntimeError("counted outside of every module")


def distinct_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor, those that several elements share counted once."""
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride or not size:
            count *= size
    return count


def _tensors(tree) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _is_free(func, operands: list[torch.Tensor], results: list[torch.Tensor]) -> bool:
    """Whether an operator only allocates, or only looks at memory in another way."""
    if "empty" in func._schema.name:
        return True
    if func._schema.is_mutable:
        return False
    memory = {tensor.untyped_storage()._cdata for tensor in operands}
    return all(result.untyped_storage()._cdata in memory for result in results)

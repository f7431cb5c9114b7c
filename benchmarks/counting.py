"""Exact counts on any machine: dispatched operators, kernel launches, bytes saved for
backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.shapes import ModelShape
from hf_rmsnorm.ops.launches import forget_launches

VIEWS = (
    "view", "transpose", "permute", "unsqueeze", "expand", "slice", "detach", "alias",
    "select", "as_strided", "_unsafe_view",
)  # fmt: skip


class Operators(TorchDispatchMode):
    """Names of dispatched operators, views left out, in the `Counter` ``counts``."""

    def __init__(self):
        super().__init__()
        self.counts: Counter = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if name != "t" and not name.startswith(VIEWS):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))

    @property
    def computing(self) -> int:
        """How many that compute: allocations left out too."""
        names = [n for n in self.counts if not n.startswith(("empty", "new_empty"))]
        return sum(self.counts[name] for name in names)


def saved_bytes(function: Callable, parameters: Iterable[torch.Tensor] = ()) -> int:
    """Bytes of the distinct storages that `function` saves for backward, parameters not
    counted; on any device.
    """
    kept = {}

    def pack(t):
        storage = t.untyped_storage()
        kept[storage._cdata] = storage
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = function()
    for parameter in parameters:
        kept.pop(parameter.untyped_storage()._cdata, None)
    total = sum(storage.nbytes() for storage in kept.values())
    del result
    return total


@contextmanager
def no_launch_kept() -> Iterator[None]:
    """Empty the caches of launches before and after: what serves a device is another
    meanwhile.
    """
    forget_launches()
    try:
        yield
    finally:
        forget_launches()


def build(shape: ModelShape, layers: int, device: str) -> torch.nn.Module:
    """A random causal LM of the shape, in bfloat16."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**shape.config(layers))
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)

"""Exact counts on any machine: dispatched operators, kernel launches, bytes saved for
backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.shapes import ModelShape
from hf_rmsnorm.ops import backend, use_backend
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
        return sum(
            n
            for name, n in self.counts.items()
            if not name.startswith(("empty", "new_empty"))
        )


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
    own = {p.untyped_storage()._cdata for p in parameters}
    total = sum(
        storage.nbytes() for address, storage in kept.items() if address not in own
    )
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


@contextmanager
def kernels_left_out() -> Iterator[None]:
    """In this process, have every device served by kernels that are counted and not
    run: results are not computed.

    Values do not change how much a call allocates, saves and launches. So this counts
    without a GPU, and on the meta device too.
    """
    from hf_rmsnorm.kernels import compiled

    with ExitStack() as stack:
        stack.enter_context(
            mock.patch.object(backend, "_device_refusal", lambda *_: None)
        )
        stack.enter_context(
            mock.patch.object(compiled, "device_limits", lambda *_: (132, 232_448))
        )
        stack.enter_context(
            mock.patch.object(compiled.Kernel, "load", lambda *_: lambda operands: None)
        )
        stack.enter_context(no_launch_kept())
        stack.enter_context(use_backend("triton"))
        yield


def build(
    shape: ModelShape,
    layers: int,
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> torch.nn.Module:
    """A random causal LM of the shape."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**shape.config(layers))
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)

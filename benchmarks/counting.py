"""Exact counts on any machine: dispatched operators, kernel launches, bytes saved for
backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.shapes import ModelShape
from hf_rmsnorm import count_launches, patch_model
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


def small(shape: ModelShape) -> ModelShape:
    """The architecture of a shape at sizes that take no time: counts of calls do not
    depend on them.
    """
    return replace(
        shape,
        hidden_size=64,
        intermediate_size=96,
        heads=4,
        key_heads=2,
        head_dim=16,
        vocabulary=128,
    )


def _one_layer(count: Callable[[int], Counter]) -> dict[str, int]:
    three, two = count(3), count(2)
    return {name: three[name] - two[name] for name in three}


def decoded_layer(shape: ModelShape, patch: bool, **options) -> dict[str, int]:
    """What one decoder layer costs per decoded token: ``operators`` dispatched (neither
    views nor allocations), ``launches`` of this package, and their ``sum``; `options`
    are those of `patch_model`.

    It is the difference between models of three and of two layers.
    """

    def count(layers: int) -> Counter:
        model = build(small(shape), layers).eval()
        if patch:
            patch_model(model, **options)
        ids = torch.arange(3, 9)[None]
        with torch.no_grad(), kernels_left_out():
            cache = model(ids, use_cache=True).past_key_values
            with Operators() as operators, count_launches() as launches:
                model(ids[:, :1], past_key_values=cache, use_cache=True)
        ours = launches.total()
        return Counter(
            operators=operators.computing, launches=ours, sum=operators.computing + ours
        )

    return _one_layer(count)


def saved_by_layer(shape: ModelShape, patch: bool, tokens: int = 16) -> float:
    """Bytes that one decoder layer of the real size saves for backward per token, in
    bfloat16; nothing is computed.

    The attention runs in plain operators, as Transformers does with a mask. It keeps
    more than a fused one, by the same number of bytes with and without the patch.
    """

    def count(layers: int) -> Counter:
        model = build(shape, layers, "meta").train()
        if patch:
            patch_model(model)
        ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
        # as it is used: nothing to check
        mask = torch.zeros(1, 1, tokens, tokens, dtype=torch.bfloat16, device="meta")
        with kernels_left_out():
            return Counter(
                bytes=saved_bytes(
                    lambda: model.model(ids, mask, use_cache=False)[0],
                    model.parameters(),
                )
            )

    return _one_layer(count)["bytes"] / tokens

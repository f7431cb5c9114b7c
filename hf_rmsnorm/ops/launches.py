"""The caches of launches: what starts the kernels of a formula, by a key of the tensors
that it is for.
"""

import weakref
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..formula import NormSpec
from ..reference import reference_norm
from .direct import DIRECT_TYPES

MISSING = object()
_HIP = torch.version.hip is not None
_all: weakref.WeakSet = weakref.WeakSet()


class KeptLaunches:
    """Launch key -> what allocates the outputs and starts the kernels, or None where the kernels do not serve.

    Forwards and backwards are in one dictionary, each under the key of what arrives. It
    is no dictionary itself: Dynamo would guard on its items.

    Attributes:
        by_key: the dictionary.
    """

    MOST = 8_192  # generation with a growing prompt makes one per length

    def __init__(self):
        self.by_key = {}
        _all.add(self)

    def keep(self, key: tuple, make: Callable, *arguments):
        """The launch ``make(*arguments)``, which is kept from now on. At `MOST` launches
        the dictionary is emptied first.
        """
        # It asks for strides by tensors on meta, which the caller's modes are not to see.
        with _disable_current_modes(), torch.inference_mode(False):
            launch = make(*arguments)
        if len(self.by_key) >= self.MOST:
            self.by_key.clear()
        self.by_key[key] = launch
        return launch


class Launches(KeptLaunches):
    """The launches of a norm, with or without a residual sum, a gate or a modulation.

    Args:
        spec: the formula.
        suits: ``suits(x, weight, bias, gate)`` says whether the formula is what such
            tensors are to be computed by; asked once for each key.
        modulation: what becomes of the scale of a modulation: ``"modulate_after"`` is
            ``1 + scale``, ``"multiply_after"`` the scale alone.
        keeps_output: the backward shall read the output, not x, where
            `serves_as_input`.
        copies_input: the backward shall read a copy of x in half precision, as x may be
            written to.
        paths_of: ``paths_of(id(weight))`` names the norms that may have a weight, for
            an error.
    """

    def __init__(
        self,
        spec: NormSpec,
        suits: Callable | None = None,
        modulation: str = "modulate_after",
        keeps_output: bool = False,
        copies_input: bool = False,
        paths_of: Callable | None = None,
    ):
        super().__init__()
        self.spec = spec
        self.modulation = modulation
        self.keeps_output = keeps_output
        self.copies_input = copies_input
        self.paths_of = paths_of
        self.suits = suits

    def in_plain_torch(self, x, weight, bias, gate) -> Tensor:
        """The formula with its modulation, in differentiable operators."""
        if gate is None or self.spec.gate is not None:
            return reference_norm(x, weight, bias, self.spec, gate)
        scale = 1 + gate if self.modulation == "modulate_after" else gate
        return reference_norm(x, weight, bias, self.spec) * scale


@lru_cache(1_024)
def launches_of(
    spec: NormSpec, modulation: str = "modulate_after", keeps_output: bool = False
) -> Launches:
    """The launches of a formula that belongs to no module."""
    return Launches(spec, None, modulation, keeps_output)


def forget_launches() -> None:
    """Empty the caches of launches, so that each call chooses its backend again."""
    for launches in list(_all):
        launches.by_key.clear()


def key_of(kind: tuple, operands: tuple) -> tuple | None:
    """The launch key of such operands: all that decides whether and how they are
    served.

    None if a tensor is of a subclass, or has no shape or no memory. Such are nested,
    sparse and batched tensors, and those that functorch has left behind.

    Args:
        kind: hashable; the kind of launch.
        operands: the tensors that kernels read, or None.

    Returns:
        A tuple. Its last entry says whether all tensors start at multiples of 16 bytes.
        On AMD, where Triton compiles for offsets of 32 bits, the key also has which
        storages are below 2 GiB.
    """
    key = kind
    aligned = True
    absent = 0  # in binary: for each operand 1 if it is None
    try:
        for t in operands:
            absent *= 2
            if t is None:
                absent += 1
                continue
            if type(t) not in DIRECT_TYPES:
                return None
            address = t.data_ptr()
            # no memory; but launches for meta tensors can be counted
            if not address and t.numel() and not t.is_meta:
                return None
            if address & 15:
                aligned = False
            # Nested tuples: to append to a list takes longer.
            key = key, t.shape, t.stride(), t.dtype, t.device
            if _HIP:
                key = key, t.untyped_storage().nbytes() < 2**31
    except RuntimeError:  # of what has no memory or no shape
        return None
    return key, absent, aligned

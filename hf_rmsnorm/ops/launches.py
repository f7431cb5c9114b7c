"""Which launch serves such tensors: one that is kept for their layout, or one that is
made for it.

`norm.run_norm`, `qk.run_qk` and their backwards call `by_kernel`. Where there is no launch yet,
the kind makes it (`norm_kinds`, `qk_kinds`), and `first_use` compares its results.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from types import SimpleNamespace

import torch
from torch import Tensor
from torch._C import _current_graph_task_id
from torch.nn import Parameter
from torch.utils._python_dispatch import _disable_current_modes

from ..formula import NormSpec
from ..kernels.failure import (
    KernelUnavailable,
    failed_devices,
    left_devices,
    unavailable,
)
from ..operands import ONE_PLUS, Operands, Replaced
from . import first_use
from .first_use import FirstUse, layout_of
from .kinds import Kind, Launch
from .settings import insists

TENSOR_TYPES = (Tensor, Parameter)  # others have to see the operators
MISSING = object()
_HIP = torch.version.hip is not None
_all: weakref.WeakSet = weakref.WeakSet()
_failing = threading.Lock()


def by_kernel(
    launches: Launches,
    kind: Kind,
    operands: Operands,
    apply: Callable | None = None,
    replaced: Replaced | None = None,
) -> Operands | None:
    """The results of a launch for such operands, or what `apply` makes of them; None
    where no kernel serves them.

    Args:
        kind: its ``make`` is asked once for each key.
        operands: as the launch takes them.
        apply: that of an autograd function, for a place in autograd's graph: the
            results are ``apply((launches, launch), *operands)``.
        replaced: (function, *arguments), the code whose results these are; None where
            that is the formula in plain torch.
    """
    try:
        launch = find(launches, kind, operands)
        if launch is None:
            return None
        if type(launch) is FirstUse:
            return launch.compared_results(operands, apply, replaced)
        if apply is None:
            return launch.on(operands)
        return apply((launches, launch), *operands)
    except KernelUnavailable as error:
        give_up(error, operands[0].device)
        return None
    except RuntimeError:
        if any(t is not None and t.is_inference() for t in operands):
            return None  # autograd saves none, but the result of a plain operator
        raise


def find(launches: Launches, kind: Kind, operands: Operands) -> Launch | None:
    """The launch for such operands: one that is kept, or else one that is made.

    None where no kernel serves them. So too if a tensor is of a subclass, or has no
    shape or no memory: nested, sparse and batched tensors, and those that functorch has
    left behind.

    Its key is all that decides whether and how operands are served: the kind; shape,
    strides, dtype and device of each; and whether all start at multiples of 16 bytes.
    On AMD, where Triton compiles for offsets of 32 bits, also which storages are below
    2 GiB.
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
            if type(t) not in TENSOR_TYPES:
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
    key = key, absent, aligned
    launch = launches.by_key.get(key, MISSING)
    if launch is MISSING:
        launch = launches.keep(key, kind, operands, aligned)
    return launch


@dataclass(eq=False)
class Launches:
    """Launch key -> the launch, or None where the kernels do not serve.

    Forwards and backwards are in one dictionary, each under the key of what arrives. It
    is no dictionary itself: Dynamo would guard on its items.

    Args:
        spec: the formula, with or without a residual sum, a gate or a modulation; None
            of a rotary embedding alone.
        suits: ``suits(x, weight, bias)`` says whether the formula is what such
            tensors are to be computed by; asked once for each key.
        modulation: what becomes of the scale of a modulation: `ONE_PLUS` or `ALONE`.
        keeps_output: the backward shall read the output, not x, where
            `serves_as_input`.
        paths_of: ``paths_of(id(weight))`` names the norms that may have a weight, for
            an error.

    Attributes:
        by_key: the dictionary.
        compared_layouts: layouts that were compared with plain torch, and need not be again.
        tries: by layout, comparisons that have shown nothing.
    """

    MOST = 8_192  # generation with a growing prompt makes one per length

    spec: NormSpec | None
    suits: Callable | None = None
    modulation: str = ONE_PLUS
    keeps_output: bool = False
    paths_of: Callable | None = None

    def __post_init__(self):
        self.by_key: dict[tuple, Launch | FirstUse | None] = {}
        self.compared_layouts: set[tuple] = set()
        self.tries: Counter[tuple] = Counter()
        _all.add(self)

    def keep(
        self, key: tuple, kind: Kind, operands: Operands, aligned: bool
    ) -> Launch | None:
        """The launch of a kind for such operands, which is kept from now on. At `MOST`
        launches the dictionary is emptied first.
        """
        # It asks for strides by tensors on meta, which the caller's modes are not to see.
        with _disable_current_modes(), torch.inference_mode(False):
            launch = kind.make(self, operands, aligned)
        if len(self.by_key) >= self.MOST:
            self.by_key.clear()
        if launch is not None and first_use.is_enabled:
            layout = layout_of(kind, operands, aligned)
            if layout not in self.compared_layouts:
                launch = FirstUse(launch, self, key, kind, layout)
        self.by_key[key] = launch
        return launch


@cache
def kernels() -> SimpleNamespace:
    """The launches of the kernels, by name. Loaded when the first is made, as they need
    triton.

    Raises:
        KernelUnavailable: Triton cannot be imported, or reads no source of the kernels.
    """
    try:
        from ..kernels import norm_launch, qk_launch
    except Exception as error:
        raise unavailable(error) from error
    return SimpleNamespace(
        NormForward=norm_launch.NormForward,
        NormBackward=norm_launch.NormBackward,
        QKForward=qk_launch.QKForward,
        QKBackward=qk_launch.QKBackward,
    )


@lru_cache(1_024)
def launches_of(
    spec: NormSpec, modulation: str = ONE_PLUS, keeps_output: bool = False
) -> Launches:
    """The launches of a formula that belongs to no module."""
    return Launches(spec, None, modulation, keeps_output)


def forget_launches() -> None:
    """Empty the caches of launches, so that each call chooses its backend again."""
    for launches in list(_all):
        launches.by_key.clear()
        launches.compared_layouts.clear()
        launches.tries.clear()


def give_up(error: KernelUnavailable, device: torch.device) -> None:
    """Leave a device to plain torch from now on, as its kernels cannot be loaded; a
    warning says so once.

    Within a backward, forwards are left when it ends: a checkpoint runs some of them
    again, as they were.

    Raises:
        KernelUnavailable: the error, where `use_backend("triton")` insists on the
            kernels.
    """
    if insists():
        raise error
    with _failing:
        first = device not in failed_devices
        failed_devices.setdefault(device, str(error))
    if _current_graph_task_id() == -1:
        _leave(device)
    else:
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(partial(_leave, device))
    if first:
        warnings.warn(
            f"hf_rmsnorm: {error}\nOn {device} patched modules run their own forward from now on; "
            "after the cure, start Python again.",
            stacklevel=2,
        )


def _leave(device: torch.device) -> None:
    lines = failed_devices[device].splitlines()
    left_devices[device.type, device.index] = "; ".join(lines)
    forget_launches()

"""Calls of a launch: one that is kept for such operands, or one that is made for them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.failure import KernelUnavailable
from .backend import give_up
from .launches import MISSING, KeptLaunches, Launches, key_of


def by_kernel(
    launches: KeptLaunches,
    kind: tuple,
    operands: tuple,
    make: Callable,
    apply: Callable | None = None,
):
    """The results of a launch for such operands; None where no kernel serves them.

    Args:
        kind: of the launch, with all that its key has besides the operands.
        operands: as the kernels take them.
        make: ``make(launches, kind, operands, aligned)`` returns the launch, or None.
            It is asked once for each key.
        apply: of the autograd function, where a gradient is asked for. Its first
            argument is (launches, launch).
    """
    key = key_of(kind, operands)
    if key is None:
        return None
    try:
        launch = launches.by_key.get(key, MISSING)
        if launch is MISSING:
            launch = launches.keep(key, make, launches, kind, operands, key[-1])
        if launch is None:
            return None
        if apply is None:
            return launch.launch(operands)
        return apply((launches, launch), *operands)
    except KernelUnavailable as error:
        give_up(error, operands[0].device)
        return None


@dataclass
class OnCopies:
    """A launch on operands in another layout than it was made for: it copies them.

    Hooks of saved tensors (`torch.autograd.graph.save_on_cpu`) may give tensors back
    with other strides than the forward read.

    Args:
        inner: the launch.
        prepare: ``prepare(operands)`` returns them in the layout that it reads.
    """

    inner: object
    prepare: Callable

    def launch(self, operands: tuple):
        return self.inner.launch(self.prepare(operands))


WRITTEN = "modified by an inplace operation"


def checkpointed_version(t: Tensor) -> int | None:
    """The version of a tensor that `torch.utils.checkpoint` will compute again, whose
    hooks keep autograd from looking for a write; None of any other.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None or hooks[0].__module__ != "torch.utils.checkpoint":
        return None
    return t._version


def saved_tensors(ctx, launches: Launches) -> tuple:
    """What a forward has saved for its backward.

    Args:
        ctx: of the autograd function; its `weight` is the id of the norm's weight, its
            `version` the `checkpointed_version` of the first tensor.

    Raises:
        RuntimeError: one was written to in place; the error names the norm.
    """
    try:
        saved = ctx.saved_tensors
    except RuntimeError as error:
        if launches.paths_of is None or WRITTEN not in str(error):
            raise
        raise _written(ctx, launches) from error
    if ctx.version is not None and saved[0]._version > ctx.version:
        raise _written(ctx, launches)
    return saved


def _written(ctx, launches: Launches) -> RuntimeError:
    paths = [] if launches.paths_of is None else launches.paths_of(ctx.weight)
    which = ", ".join(map(repr, paths[:3])) or "a norm"
    if len(paths) > 3:
        which += ", ..."
    exclude = f"[{which}]" if paths else "its path"
    return RuntimeError(
        f"{which}: what this norm keeps for its backward has been {WRITTEN} since its forward. "
        f"Where the model trains unpatched, leave it out: patch_model(model, exclude={exclude})"
    )


def require_unchanged(device, expected: dict) -> None:
    """Check that tensors are as the forward read them: name -> (tensor, its shape then).

    ``weight.data = torch.empty(0)``, as offloading by hand does, changes a saved
    tensor, and autograd does not notice. A kernel would read past its end.

    Raises:
        RuntimeError: one has another shape or device.
    """
    for name, (t, shape) in expected.items():
        if t is None or (t.shape == shape and t.device == device):
            continue
        raise RuntimeError(
            f"{name} changed between forward and backward: the backward expects shape {tuple(shape)} on {device}, "
            f"and finds {tuple(t.shape)} on {t.device}; keep what a forward has read as it is until its backward "
            "has run"
        )

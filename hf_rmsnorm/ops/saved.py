"""What a forward saves for its backward, and whether that comes back as it was: hooks of
saved tensors may copy it, and other code may write to it.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .launches import Launches

WRITTEN = "modified by an inplace operation"


class Unwatched(NamedTuple):
    """A tensor that hooks of saved tensors take, which keep autograd from looking for a
    write.

    Args:
        version: its version then.
        storage: its memory; None under `torch.utils.checkpoint`, which computes the
            tensor again.
    """

    version: int
    storage: StorageWeakRef | None

    def is_written(self, t: Tensor) -> bool:
        """Whether a tensor that the hooks give back was written to since; not if it is
        a copy.
        """
        is_copy = False
        if self.storage is not None:
            is_copy = StorageWeakRef(t.untyped_storage()) != self.storage
        return not is_copy and t._version > self.version


def unwatched(t: Tensor) -> Unwatched | None:
    """A tensor that a forward saves, if there are hooks of saved tensors."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None:
        return None
    storage = None
    if hooks[0].__module__ != "torch.utils.checkpoint":
        storage = StorageWeakRef(t.untyped_storage())
    return Unwatched(t._version, storage)


def saved_tensors(ctx, launches: Launches) -> tuple:
    """The tensors that a forward has saved for its backward.

    Args:
        ctx: of the autograd function; its `weight` is the id of the norm's weight, its
            `unwatched` that of the first tensor.

    Raises:
        RuntimeError: one was written to in place; the error names the norm.
    """
    try:
        saved = ctx.saved_tensors
    except RuntimeError as error:
        if launches.paths_of is None or WRITTEN not in str(error):
            raise
        raise _written(ctx, launches) from error
    if ctx.unwatched is not None and ctx.unwatched.is_written(saved[0]):
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

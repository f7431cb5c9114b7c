"""Notices an activation checkpoint that recomputes a norm under another backend than its forward ran under.

Torch links a forward and its recompute only by objects in the frames of `torch.utils.checkpoint`, so that is where this
looks, and only once `use_backend` has been used in the process: nobody else pays for the walk up the stack.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import torch.utils.checkpoint

_FILE = torch.utils.checkpoint.__file__
_RECORD = "_hf_rmsnorm_backends"


def _region() -> tuple[object, bool] | None:
    """(what torch keeps of the innermost checkpointed region on the stack, whether it is being recomputed)."""
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code.co_filename == _FILE:
            names = frame.f_locals
            if code.co_name in ("forward", "backward") and "ctx" in names:  # reentrant: CheckpointFunction
                return names["ctx"], code.co_name == "backward"
            if code.co_name == "unpack_hook" and "frame" in names:
                return names["frame"], True
            if code.co_name == "checkpoint" and names.get("gen") is not None:
                inner = names["gen"].gi_frame
                return (inner.f_locals["new_frame"], False) if inner and "new_frame" in inner.f_locals else None
        frame = frame.f_back
    return None


def same_as_forward(backend: str, explicit: bool, automatic: Callable[[], str], weight: torch.Tensor | None) -> str:
    """The backend this call shall use, given that it was asked to use `backend`.

    Args:
        explicit: whether a `use_backend` other than auto is in force in this thread.
        automatic: says what ``auto`` would answer, which is what a forward used that left no record.

    Raises:
        RuntimeError: this is a recompute, and the forward it repeats ran under another backend.
    """
    region = _region()
    if region is None:
        return backend
    owner, recompute = region
    record = getattr(owner, _RECORD, None)
    if not recompute:
        if record is None:
            record = {}
            setattr(owner, _RECORD, record)
        record.setdefault(id(weight), {})[backend] = threading.get_ident()
        return backend
    before = {automatic(): None} if record is None else record.get(id(weight), {backend: None})
    if backend in before:
        return backend
    name, thread = next(iter(before.items()))
    if thread is not None and thread != threading.get_ident() and not explicit:
        return name  # autograd's own thread, which no `use_backend` of the caller reaches
    raise RuntimeError(
        f"an activation checkpoint recomputes a norm under backend {backend!r}, but its forward ran under "
        f"{name!r}: keep backward() inside the same use_backend(...)"
    )

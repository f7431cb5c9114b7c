"""The choices of a user: `hf_rmsnorm.settings` for the process, `use_backend` for the
calls of one thread.
"""

import threading
from dataclasses import dataclass

from torch._C import _current_graph_task_id

CHOICES = {"while_compiling": ("original", "operator")}
BACKENDS = ("auto", "triton", "reference")


@dataclass
class Settings:
    """Choices that hold in every thread, read at each call.

    Args:
        while_compiling: what `torch.compile` traces in a patched model. ``"original"``:
            the model's own code, so that the graph is that of the unpatched model, and
            Inductor fuses it as it likes. ``"operator"``: each norm is one opaque
            operator, with the kernel and the bits of eager. A change compiles the model
            again.

    Raises:
        ValueError: a value that is none of these, or a setting that does not exist.

    Example:
        >>> from hf_rmsnorm import settings
        >>> settings.while_compiling
        'original'
    """

    while_compiling: str = "original"

    def __setattr__(self, name: str, value):
        if name not in CHOICES:
            raise ValueError(
                f"settings.{name}: no such setting, there are {', '.join(CHOICES)}"
            )
        if value not in CHOICES[name]:
            raise ValueError(
                f"settings.{name} = {value!r}: choose one of {', '.join(CHOICES[name])}"
            )
        super().__setattr__(name, value)


settings = Settings()


class _Chosen(threading.local):
    def __init__(self):
        # not of the class, where Dynamo of torch 2.11 would read it in all threads
        self.backend = "auto"


chosen = _Chosen()
# an entry for each `use_backend("triton")` that is entered, in whatever thread
_insisting = []


def insists() -> bool:
    """Whether the kernels are insisted on. A backward may run in a thread of autograd's
    own, so there any thread's.
    """
    in_backward = _current_graph_task_id() != -1
    if in_backward:
        return bool(_insisting)
    return chosen.backend == "triton"


class use_backend:
    """Choose, in this thread and inside the ``with``, what computes the norms.

    Args:
        name: ``"auto"`` launches Triton on devices it serves (and anywhere under
            ``TRITON_INTERPRET=1``); elsewhere, and in an exported graph, a patched
            module runs its own forward. ``"triton"`` insists on the kernels, in exports
            too, and raises where they cannot run. ``"reference"`` computes the
            plain-torch formula everywhere.

    Raises:
        ValueError: the name is none of these.

    A backward uses the backend that its forward used. A recompute under activation
    checkpointing uses the backend that is chosen when it runs, on a GPU ``"auto"``
    (docs/start.md). So keep ``loss.backward()`` inside the ``with``.

    Example:
        >>> import torch
        >>> from hf_rmsnorm import rms_norm, use_backend
        >>> with use_backend("reference"):
        ...     rms_norm(torch.tensor([1.0, 2.0, 3.0, 4.0]), eps=0.0)
        tensor([0.3651, 0.7303, 1.0954, 1.4606])
    """

    def __init__(self, name: str):
        if name not in BACKENDS:
            raise ValueError(
                f"use_backend({name!r}): no such backend, choose one of {', '.join(BACKENDS)}"
            )
        self.name = name
        self._previous = []

    def __enter__(self):
        self._previous.append(chosen.backend)
        chosen.backend = self.name
        if self.name == "triton":
            _insisting.append(self)
        return self

    def __exit__(self, *exc):
        chosen.backend = self._previous.pop()
        if self.name == "triton":
            _insisting.pop()


def chosen_backend() -> str:
    """What `use_backend` has chosen in this thread; ``"auto"`` outside of one."""
    return chosen.backend

"""Public operators and the choice of backend."""

from .backend import runs_on
from .limits import input_needed
from .norm import layer_norm, rms_norm
from .settings import chosen_backend, use_backend

__all__ = [
    "chosen_backend", "input_needed", "layer_norm",
    "rms_norm", "runs_on", "use_backend",
]  # fmt: skip

"""Public operators and the choice of backend."""

from .backend import runs_on
from .limits import input_needed
from .norm import compute_norm, layer_norm, rms_norm
from .settings import chosen_backend, use_backend

__all__ = [
    "chosen_backend", "compute_norm", "input_needed", "layer_norm",
    "rms_norm", "runs_on", "use_backend",
]  # fmt: skip

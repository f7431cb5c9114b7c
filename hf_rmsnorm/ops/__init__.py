"""Public operators and the choice of backend."""

from .backend import describe_backend, resolve_backend, use_backend
from .norm import fused_norm, layer_norm, rms_norm

__all__ = ["describe_backend", "fused_norm", "layer_norm", "resolve_backend", "rms_norm", "use_backend"]

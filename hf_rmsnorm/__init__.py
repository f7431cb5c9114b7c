"""Fused Triton RMSNorm and LayerNorm for Hugging Face Transformers, recognised by arithmetic and proven equal.

Nothing is loaded on import, neither torch nor triton nor transformers, and no global of theirs changes. Only
`torch.ops.hf_rmsnorm` learns to load its operators when one is asked for, as a file that `torch.export` saved does.
"""

import ast
import sys
from importlib import import_module
from pkgutil import get_data

__version__ = "0.1.0"

# The stub is the one list of the public names, which type checkers read too.
_STUB = ast.parse(get_data(__name__, "__init__.pyi"))
_HOMES = {name.name: node.module for node in _STUB.body if isinstance(node, ast.ImportFrom) for name in node.names}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__():
    return sorted(__all__)


def _load_operators(name: str):
    if not name.startswith("__"):
        import_module(".ops.operators", __name__)
    raise AttributeError(name)  # whereupon torch looks for the operator


class _AfterTorch:
    """A finder of no module, which sees by what is imported that torch is there."""

    @classmethod
    def find_spec(cls, *_):
        if hasattr(ops := sys.modules.get("torch._ops"), "ops"):
            sys.meta_path = [finder for finder in sys.meta_path if finder is not cls]  # a new one: this is being read
            ops.ops.hf_rmsnorm.__getattr__ = _load_operators


sys.meta_path.insert(0, _AfterTorch)
_AfterTorch.find_spec()

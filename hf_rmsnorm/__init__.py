"""Fused Triton RMSNorm and LayerNorm for Hugging Face Transformers, recognised by arithmetic and proven equal.

Nothing happens on import: no global of torch or transformers changes, and neither triton nor transformers is loaded
until a function that needs it is called.
"""

import ast
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

"""What fits into the libraries around Transformers: its Trainer, TRL, PEFT, and `kernels`.

Nothing of them is imported until a name of this package is used.
"""

from importlib import import_module

_HOMES = {"HfRmsNormCallback": "trainer", "Recentre": "finetuned", "train_as_rms": "finetuned"}
__all__ = [*_HOMES]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__():
    return sorted(__all__)

"""What may be chosen for a whole process: `hf_rmsnorm.settings`."""

from __future__ import annotations

from dataclasses import dataclass

CHOICES = {"while_compiling": ("operator", "formula")}


@dataclass
class Settings:
    """Choices that hold in every thread, read at each call.

    Args:
        while_compiling: what `torch.compile` sees of a patched norm. ``"operator"``: one opaque operator, the same
            kernel and bits as in eager. ``"formula"``: the module's own forward, which Inductor fuses with its
            neighbours and rounds in its own way. A model that is compiled already is compiled anew.

    Raises:
        ValueError: a value that is none of these, or a setting that does not exist.

    Example:
        >>> from hf_rmsnorm import settings
        >>> settings.while_compiling
        'operator'
    """

    while_compiling: str = "operator"

    def __setattr__(self, name: str, value):
        if name not in CHOICES:
            raise ValueError(f"settings.{name}: no such setting, there are {', '.join(CHOICES)}")
        if value not in CHOICES[name]:
            raise ValueError(f"settings.{name} = {value!r}: choose one of {', '.join(CHOICES[name])}")
        super().__setattr__(name, value)


settings = Settings()

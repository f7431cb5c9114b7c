"""A model that was trained as RMSNorm says so when it is saved: its config names a class of LayerNorms."""

from __future__ import annotations

import warnings
from functools import cache

import torch

from ..fused.norm import fused_part
from ..fused.subclass import derive, marked
from ..record import RECORD_KEY, trained_as_rms

TRAINED = (
    "this model was trained as RMSNorm: loaded without hf_rmsnorm.patch_model, what is saved here computes LayerNorm, "
    "which is another function; hf-rmsnorm convert FOLDER DST --target native writes a whole model as one that needs "
    "no package, where there is such an architecture"
)


def watch(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Have the models inside a patched one warn when they are saved, where they were trained as RMSNorm.

    Returns:
        Those that did not before.
    """
    found = [
        module
        for module in model.modules()
        if hasattr(type(module), "save_pretrained")
        and is_trained(module)
        and marked(type(module), "_hf_rmsnorm_unwatched") is None
        and any((fused := fused_part(type(m))) and fused._hf_rmsnorm_recipe.imposed for m in module.modules())
    ]
    for module in found:
        module.__class__ = watched_class(type(module), None)
    return found


def unwatch(module: torch.nn.Module) -> None:
    """Undo `watch` of one module."""
    cls = marked(type(module), "_hf_rmsnorm_unwatched")
    if cls is type(module):
        module.__class__ = cls._hf_rmsnorm_unwatched


def is_trained(module: torch.nn.Module) -> bool:
    """Whether a model's config says that it was trained as RMSNorm."""
    return trained_as_rms(getattr(getattr(module, "config", None), RECORD_KEY, None))


@cache
def watched_class(base: type, _) -> type:
    """A subclass of a model's class that warns in `save_pretrained`."""

    def save_pretrained(self, *args, **kwargs):
        if is_trained(self):
            warnings.warn(TRAINED, stacklevel=2)
        return base.save_pretrained(self, *args, **kwargs)

    save_pretrained.__doc__ = base.save_pretrained.__doc__
    marks = {"_hf_rmsnorm_unwatched": base, "save_pretrained": save_pretrained}
    return derive(base, None, marks, watched_class, None)

"""Fused Triton RMSNorm and LayerNorm for Hugging Face Transformers, recognised by arithmetic and proven equal.

Nothing happens on import: no global of torch or transformers changes, and neither triton nor transformers is loaded
until a function that needs it is called.
"""

from importlib import import_module

__version__ = "0.1.0"

_HOMES = {
    "NormSpec": "formula",
    "rms_norm": "ops",
    "layer_norm": "ops",
    "use_backend": "ops",
    "settings": "ops.settings",
    "count_launches": "kernels",
    "patch_model": "patching",
    "unpatch_model": "patching",
    "patched": "patching",
    "PatchReport": "patching",
    "verify_equivalence": "verification",
    "EquivalenceReport": "verification",
    "inspect_norms": "verification",
    "plan_conversion": "conversion",
    "convert_checkpoint": "conversion",
    "convert_adapter": "conversion",
    "HfRmsNormCallback": "integrations.trainer",
    "Recentre": "integrations.finetuned",
    "train_as_rms": "integrations.finetuned",
}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__():
    return sorted(__all__)

"""Fused Triton RMSNorm and LayerNorm for Hugging Face Transformers, recognised by
arithmetic and proven equal.

Example:
    >>> from hf_rmsnorm import patch_model
    >>> report = patch_model(model)

`import hf_rmsnorm` loads neither torch nor triton nor transformers: a public name is
loaded when it is first used.
"""

from importlib import import_module

__version__ = "0.1.0"

# Where each public name is. __init__.pyi says the same to type checkers.
_MODULES = {
    "EquivalenceReport": "verification",
    "HfRmsNormCallback": "integrations.trainer",
    "NormSpec": "formula",
    "PatchReport": "patching",
    "Recentre": "converted.finetuned",
    "convert_checkpoint": "conversion",
    "count_launches": "patching",
    "is_patched": "patching",
    "layer_norm": "ops",
    "patch_model": "patching",
    "patched": "patching",
    "plan_conversion": "conversion",
    "rms_norm": "ops",
    "settings": "ops.settings",
    "train_as_rms": "converted.finetuned",
    "unpatch_model": "patching",
    "use_backend": "ops",
    "verify_equivalence": "verification",
}
__all__ = ["__version__", *_MODULES]


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)


def __dir__():
    return sorted(__all__)

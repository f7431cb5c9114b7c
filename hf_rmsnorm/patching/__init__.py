"""Finds the norms of a loaded model by their arithmetic and swaps them in place for
fused ones.
"""

from .api import is_patched, patch_model, patched, unpatch_model
from .launch_counts import count_launches
from .report import PatchReport

__all__ = [
    "PatchReport",
    "count_launches",
    "is_patched",
    "patch_model",
    "patched",
    "unpatch_model",
]

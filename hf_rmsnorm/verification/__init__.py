"""Compares a patched or changed model with the original: `verify_equivalence` and its
report.
"""

from .checks import Check
from .equivalence import verify_equivalence
from .inspection import Inspection, NaiveSwap, NormInput, inspect_norms
from .noise import LogitDifference, NoiseFloor
from .report import EquivalenceReport

__all__ = [
    "Check", "EquivalenceReport", "Inspection", "LogitDifference", "NaiveSwap",
    "NoiseFloor", "NormInput", "inspect_norms", "verify_equivalence",
]  # fmt: skip

"""Compares a patched or changed model with the original: `verify_equivalence` and its
report.
"""

from .checks import NormCheck
from .equivalence import verify_equivalence
from .inspection import Inspection, NaiveSwap, NormInput, inspect_norms
from .noise import LogitDifference, NoiseFloor
from .report import EquivalenceReport, GreedyComparison, GreedyDifference

__all__ = [
    "EquivalenceReport", "GreedyComparison", "GreedyDifference", "Inspection",
    "LogitDifference", "NaiveSwap", "NoiseFloor", "NormCheck", "NormInput",
    "inspect_norms", "verify_equivalence",
]  # fmt: skip

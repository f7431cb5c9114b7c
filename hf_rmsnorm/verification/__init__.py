"""Compares a patched or changed model with the original: `verify_equivalence` and its
report.
"""

from .checks import Check
from .equivalence import verify_equivalence
from .noise import NoiseFloor
from .report import EquivalenceReport

__all__ = [
    "Check",
    "EquivalenceReport",
    "NoiseFloor",
    "verify_equivalence",
]

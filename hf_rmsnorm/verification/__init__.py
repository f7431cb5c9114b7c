"""Proof that a changed model computes what the original does: `verify_equivalence` and its report."""

from .compare import LogitDifference, NoiseFloor
from .norms import NormCheck
from .report import EquivalenceReport, GreedyComparison, GreedyDifference
from .run import verify_equivalence

__all__ = [
    "EquivalenceReport",
    "GreedyComparison",
    "GreedyDifference",
    "LogitDifference",
    "NoiseFloor",
    "NormCheck",
    "verify_equivalence",
]

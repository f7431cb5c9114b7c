"""Proof that a changed model computes what the original does: `verify_equivalence` and its report."""

from .compare import LogitDifference, NoiseFloor
from .inspection import Inspection, NaiveSwap, NormInput, inspect_norms
from .norms import NormCheck
from .report import EquivalenceReport, GreedyComparison, GreedyDifference
from .run import verify_equivalence

__all__ = [
    "EquivalenceReport",
    "GreedyComparison",
    "GreedyDifference",
    "Inspection",
    "LogitDifference",
    "NaiveSwap",
    "NoiseFloor",
    "NormCheck",
    "NormInput",
    "inspect_norms",
    "verify_equivalence",
]

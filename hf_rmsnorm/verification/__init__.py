"""Compares a patched or changed model with the original: `verify_equivalence` and its
report.

`equivalence.py` runs both models, in this order:

- the inputs: `inputs.py` checks them, `context.py` and `pictures.py` make random ones;
- the candidate: `runs.py` takes its outputs and its text, while `parts.py` compares
  each norm and fused layer when it is called. There `calls.py` makes the call again,
  `checks.py` judges its outputs, `gradients.py` its gradients, and those of each fused
  piece (`pieces.py`);
- the original, as it is, and in float64 (`float64.py`, with `quantised.py`);
- the errors of both (`noise.py`), with the limit of `tolerance.py`, for `report.py`.

Two files serve callers alone: `layer_errors.py` the picture of ``hf-rmsnorm verify``,
and `recorded.py` converted checkpoints that were trained as RMSNorm.
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

"""LayerNorm checkpoints become RMSNorm checkpoints with the same logits.

`plan_conversion` makes a plan and proves it, and `convert_checkpoint` carries it out.
"""

from .api import Conversion, convert_checkpoint, plan_conversion
from .errors import ConversionError, ConversionRefused
from .options import ConversionOptions
from .plan import CentringPlan
from .targets.planned import PlannedConversion
from .verify.compare import VerificationFailed

__all__ = [
    "CentringPlan", "Conversion", "ConversionError", "ConversionRefused", "ConversionOptions",
    "PlannedConversion", "VerificationFailed", "convert_checkpoint", "plan_conversion",
]  # fmt: skip

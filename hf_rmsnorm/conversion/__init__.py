"""LayerNorm checkpoints become RMSNorm checkpoints with the same logits.

`plan_conversion` makes a plan and proves it, `convert_checkpoint` carries it out, and
`convert_adapter` converts a LoRA adapter of PEFT.
"""

from .api import Conversion, convert_adapter, convert_checkpoint, plan_conversion
from .plan import CentringPlan, ConversionError, ConversionRefused
from .targets.centred import PlannedConversion
from .verify.folder import VerificationFailed

__all__ = [
    "CentringPlan", "Conversion", "ConversionError", "ConversionRefused",
    "PlannedConversion", "VerificationFailed", "convert_adapter", "convert_checkpoint",
    "plan_conversion",
]  # fmt: skip

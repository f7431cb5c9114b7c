"""LayerNorm checkpoints become RMSNorm checkpoints with the same logits.

`plan_conversion` says what would be done and proves it, `convert_checkpoint` does it, `convert_adapter` does it to a
LoRA adapter of PEFT; all of them give a `Conversion` or what it was planned by.
"""

from .api import Conversion, convert_adapter, convert_checkpoint, plan_conversion
from .plan import CentringPlan, ConversionError, ConversionRefused
from .targets.centred import PlannedConversion
from .verify.folder import VerificationFailed

__all__ = [
    "CentringPlan", "Conversion", "ConversionError", "ConversionRefused", "PlannedConversion", "VerificationFailed",
    "convert_adapter", "convert_checkpoint", "plan_conversion",
]  # fmt: skip

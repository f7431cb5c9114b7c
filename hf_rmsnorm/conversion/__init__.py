"""LayerNorm checkpoints become RMSNorm checkpoints with the same logits."""

from .convert import ConvertedCheckpoint, PlannedConversion, VerificationFailed, convert_checkpoint, plan_conversion
from .plan import ConversionPlan, ConversionRefused
from .source import ConversionError

__all__ = [
    "ConversionError",
    "ConversionPlan",
    "ConversionRefused",
    "ConvertedCheckpoint",
    "PlannedConversion",
    "VerificationFailed",
    "convert_checkpoint",
    "plan_conversion",
]

"""LayerNorm checkpoints become RMSNorm checkpoints with the same logits."""

from .checkpoint.source import ConversionError
from .judge.publish import VerificationFailed
from .plan import ConversionPlan, ConversionRefused
from .targets.adapter import ConvertedAdapter, convert_adapter
from .targets.centred import ConvertedCheckpoint, PlannedConversion, convert_checkpoint, plan_conversion
from .targets.fold import plan_fold, write_folded
from .targets.native import plan_native, write_native
from .targets.postnorm.write import PostNormCheckpoint, convert_post_norm, plan_post_norm

__all__ = [
    "ConversionError",
    "ConversionPlan",
    "ConversionRefused",
    "ConvertedAdapter",
    "ConvertedCheckpoint",
    "PlannedConversion",
    "PostNormCheckpoint",
    "VerificationFailed",
    "convert_adapter",
    "convert_checkpoint",
    "convert_post_norm",
    "plan_conversion",
    "plan_fold",
    "plan_native",
    "plan_post_norm",
    "write_folded",
    "write_native",
]

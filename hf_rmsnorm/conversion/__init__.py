"""LayerNorm checkpoints become RMSNorm checkpoints with the same logits."""

from .adapter import ConvertedAdapter, convert_adapter
from .convert import ConvertedCheckpoint, PlannedConversion, convert_checkpoint, plan_conversion
from .fold import plan_fold, write_folded
from .native import plan_native, write_native
from .plan import ConversionPlan, ConversionRefused
from .postnorm_write import PostNormCheckpoint, convert_post_norm, plan_post_norm
from .publish import VerificationFailed
from .source import ConversionError

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

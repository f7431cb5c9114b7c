"""LayerNorm checkpoints become RMSNorm checkpoints with the same logits."""

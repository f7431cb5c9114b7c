"""The writer of checkpoints: opens one, lays its tensors out, writes the result."""

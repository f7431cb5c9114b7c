"""What the modules of a patched model run: norms, layers with their sums, attentions with their q and k norms."""

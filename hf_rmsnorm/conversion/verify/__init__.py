"""What was written beside its source: run side by side before it is published, and described."""

"""What fits into the libraries around Transformers, a file for each: Trainers, those told by a YAML, `kernels`."""

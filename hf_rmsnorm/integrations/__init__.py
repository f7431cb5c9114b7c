"""What fits into the libraries around Transformers: its Trainer and TRL's, PEFT, and `kernels`.

Each of its files is imported for itself, as they need different libraries.
"""

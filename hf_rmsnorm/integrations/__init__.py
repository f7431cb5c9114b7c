"""What fits into the libraries around Transformers, a file for each: its Trainer and TRL's, PEFT, and `kernels`."""

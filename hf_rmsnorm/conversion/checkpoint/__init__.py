"""One writer of checkpoints: a folder is opened, its tensors are read in pieces, what is made of them is written."""

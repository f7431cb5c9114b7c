"""One writer of checkpoints: a folder is opened, its tensors are read, and the tensors
of the result are written.
"""

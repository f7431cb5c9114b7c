"""What a checkpoint may become: planned, made of an open checkpoint, verified and
described, each in one file.
"""

"""What a checkpoint may become: planned, made of an open checkpoint, judged and described, each in one file."""
